"""Files and folders that are whole at any moment: written aside, fsynced, moved into place."""

import contextlib
import glob
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no flock.
    fcntl = None  # type: ignore[assignment]


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file aside, then move it into place: readers see the old file or the new.

    The folder of the file exists.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with filling(path):
            aside.touch(exist_ok=False)
            mode = aside.stat().st_mode
            write(aside)
            # safetensors makes its files readable by their owner alone.
            aside.chmod(mode)
            sync(aside)
            aside.replace(path)
    finally:
        # On a disk that can only be read this fails, too, and would hide why nothing was written.
        with contextlib.suppress(OSError):
            aside.unlink()
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def write_json(path: Path, content: object, indent: int = 2) -> None:
    write_text(path, json.dumps(content, indent=indent) + "\n")


@contextlib.contextmanager
def filling(path: Path) -> Iterator[None]:
    """Let an error name what is written, not the hidden one aside, or no file at all."""
    try:
        yield
    except OSError as error:
        aside = str(path.with_name(f".{path.name}."))
        if error.errno is None or not str(error.filename or aside).startswith(aside):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except SafetensorError as error:
        raise SafetensorError(f"{path}: {error}") from error


@contextlib.contextmanager
def new_folder(path: Path, old: Path | None = None) -> Iterator[Path]:
    """Fill a folder aside, then move it into place, under new parents: it is whole or absent.

    What is there already moves to `old` at the last moment; without one it is an error. A folder
    that a killed process left aside is removed; one that is still written is locked.
    """
    if old is None and os.path.lexists(path):
        raise ValueError(f"{path} exists already: choose another folder, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 16}.tmp"):
        with locked(left) as free:
            if free:
                shutil.rmtree(left, ignore_errors=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with filling(path):
            aside.mkdir()
            # Until it is in place, so that nobody takes it for one that was left.
            with locked(aside):
                yield aside
                for file in (*aside.iterdir(), aside):
                    sync(file)
                if old is not None and path.exists():
                    path.rename(old)
                # An empty folder made meanwhile would be replaced; one with files would not.
                aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    sync(path.parent)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Lock a folder; yield whether it is ours: another may have it, or there are no locks."""
    with contextlib.ExitStack() as stack:
        free = False
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            free = lock(descriptor) is True
        yield free


def lock(file: int | IO[str]) -> bool | None:
    """Lock an open file or folder until it is closed; whether it is ours, None without locks.

    When a process dies, its locks are released.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    folder = path.is_dir()
    if folder and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        # Some file systems cannot fsync a folder; a rename in it is atomic all the same.
        with contextlib.suppress(OSError) if folder else contextlib.nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
