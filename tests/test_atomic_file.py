import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError
from safetensors.torch import save_file

from deltarule import atomic_file
from deltarule.atomic_file import new_folder, write_atomically


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(aside):
        aside.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, fail)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "old")]
    write_atomically(path, lambda aside: aside.write_text("new"))
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "new")]


def test_a_place_that_is_none_is_named(tmp_path):
    def is_full(aside):
        raise OSError(errno.ENOSPC, "No space left on device")

    for path in (tmp_path / "a" / "b", tmp_path):
        with pytest.raises(OSError, match=f": '{path}'$"):
            write_atomically(path, lambda aside: aside.write_text("new"))
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/c'$"):
        write_atomically(tmp_path / "c", is_full)
    named = pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/d'$")
    with named, new_folder(tmp_path / "d") as aside:
        is_full(aside)
    with pytest.raises(SafetensorError, match=f"^{tmp_path}/c: "):
        write_atomically(tmp_path / "c", lambda aside: save_file({}, tmp_path / "none" / "c"))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_can_only_be_read_is_named_and_not_the_file_aside(tmp_path, monkeypatch):
    def refuse(path, **_):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match=f"Read-only file system: '{tmp_path}/a'$"):
        write_atomically(tmp_path / "a", lambda aside: aside.write_text("new"))


def test_the_folder_aside_is_not_named_where_it_cannot_be_made(tmp_path):
    # One that has room for its own name and for nothing before or behind it.
    longest = tmp_path / ("x" * 250)
    with pytest.raises(OSError, match="too long") as caught, new_folder(longest):
        pass
    assert caught.value.filename == str(longest)
    with pytest.raises(FileNotFoundError) as caught, new_folder(tmp_path / "a"):
        (tmp_path / "another").read_text()
    assert caught.value.filename == str(tmp_path / "another")


def test_a_folder_that_a_killed_process_left_aside_is_removed_by_the_next(tmp_path):
    killed = tmp_path / f".a.{16 * '0'}.tmp"
    for mine in (killed, tmp_path / f".b.{16 * '0'}.tmp", tmp_path / ".a.mine.tmp"):
        mine.mkdir()
        (mine / "half").touch()
    # One who still writes keeps its own.
    with new_folder(tmp_path / "a") as first:
        (first / "whole").touch()
        with new_folder(tmp_path / "a"):
            assert first.is_dir()
            assert not killed.exists()
        (tmp_path / "a").rmdir()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.mine.tmp", f".b.{16 * '0'}.tmp", "a"]
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["whole"]


def test_a_folder_is_held_until_it_is_in_its_place(tmp_path, monkeypatch):
    """The disk may take seconds to have its files; a second writer comes in the middle of that."""
    came = []

    def sync(file):
        if file.name == "whole":
            came.append(file)
            with pytest.raises(OSError, match="stops"), new_folder(tmp_path / "a"):
                raise OSError("the second writer stops")

    monkeypatch.setattr(atomic_file, "sync", sync)
    with new_folder(tmp_path / "a") as first:
        (first / "whole").touch()
    assert len(came) == 1
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["whole"]


def test_a_write_is_synced_before_it_is_moved_and_a_second_writer_spoils_nothing(
    tmp_path, monkeypatch
):
    path, events = tmp_path / "file", []

    def write(aside):
        aside.write_text("first")
        write_atomically(path, lambda other: other.write_text("second"))
        assert path.read_text() == "second"
        events.clear()

    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: events.append("sync") or fsync(fd))
    monkeypatch.setattr(Path, "replace", lambda *paths: events.append("move") or replace(*paths))
    write_atomically(path, write)
    assert events[:2] == ["sync", "move"]
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "first")]
