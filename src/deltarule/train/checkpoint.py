"""Checkpoints that survive a kill at any moment: written aside, fsynced, marked, renamed."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor

from deltarule.models.files import CheckpointError, naming
from deltarule.nn.atomic_file import sync

MARKER = "COMPLETE"
STATE = "state.json"


class Checkpoint(NamedTuple):
    """What was read: the step, the tensors of each safetensors file, and the JSON state."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


class Checkpoints:
    """The folder `runs/NAME/checkpoints` and its `step-N`.

    A checkpoint is written into a hidden folder, every file is fsynced, the marker with each
    file's hash is written last, and one rename makes it visible. So a `step-N` is always whole;
    what a kill leaves behind is hidden, and the next start removes it.

    Args:
        folder: Made if it does not exist; what a killed writer left in it is removed.
        keep: How many of the newest checkpoints to keep, 1 or more.

    Raises:
        ValueError: `keep` is below 1.

    Examples:
        >>> import tempfile, torch
        >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()), keep=2)
        >>> checkpoints.save(7, {"model": {"w": torch.ones(2)}}, {"seen": 14}).name
        'step-7'
        >>> checkpoints.newest().state
        {'seen': 14}
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        """Make the folder, and remove what a killed writer left."""
        if keep < 1:
            raise ValueError(f"keep must be 1 or more, got {keep}")
        self.folder, self.keep = folder, keep
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)

    def save(self, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> Path:
        """Write one checkpoint; afterwards it is on disk, or the old ones are as they were."""
        aside = self.folder / f".step-{step}.{os.getpid()}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for name, group in tensors.items():
            whole = {key: tensor.detach().cpu().contiguous() for key, tensor in group.items()}
            save_file(whole, aside / f"{name}.safetensors")
        for file in aside.iterdir():
            sync(file)
        hashes = {file.name: file_hash(file) for file in sorted(aside.iterdir())}
        return self.publish(aside, step, json.dumps(state), hashes)

    def publish(self, aside: Path, step: int, state: str, hashes: dict[str, str]) -> Path:
        """Make what was written, synced and hashed aside the checkpoint of a step."""
        target = self.folder / f"step-{step}"
        (aside / STATE).write_text(state)
        sync(aside / STATE)
        hashes = hashes | {STATE: file_hash(aside / STATE)}
        (aside / MARKER).write_text(json.dumps({"step": step, "sha256": hashes}))
        sync(aside / MARKER)
        sync(aside)
        self.remove(target)
        aside.rename(target)
        sync(self.folder)
        self._prune()
        return target

    def steps(self) -> list[int]:
        """Steps that carry the marker, in ascending order."""
        names = [path.parent.name for path in self.folder.glob(f"step-*/{MARKER}")]
        return sorted(int(n[5:]) for n in names if n[5:].isdecimal())

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint whose files still have the hashes they were written with.

        Returns:
            None where there is no checkpoint yet.

        Raises:
            CheckpointError: There are checkpoints, and every one of them is damaged.
        """
        failures: list[str] = []
        for step in reversed(self.steps()):
            try:
                newest = read_checkpoint(self.folder / f"step-{step}")
            except CheckpointError as error:
                failures.append(str(error))
                continue
            for failure in failures:
                print(f"note: skipped a damaged checkpoint: {failure}")
            return newest
        if failures:
            raise CheckpointError("no checkpoint can be read: " + "; ".join(failures))
        return None

    def _prune(self) -> None:
        for step in self.steps()[: -self.keep]:
            self.remove(self.folder / f"step-{step}")

    def remove(self, target: Path) -> None:
        """Hide a folder by renaming it first: a kill midway must not leave half of a `step-N`."""
        if target.exists():
            hidden = target.with_name(f".{target.name}.{os.getpid()}.old.tmp")
            shutil.rmtree(hidden, ignore_errors=True)
            target.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read one checkpoint and check every file against its hash.

    Raises:
        CheckpointError: The marker or a file is missing, changed or malformed.
    """
    step, hashes = read_marker(folder)
    for name, expected in hashes.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: the file {name!r} is missing")
        if file_hash(folder / name) != expected:
            raise CheckpointError(f"{folder / name}: damaged, its hash is not the one it had")
    files = [folder / name for name in hashes if name.endswith(".safetensors")]
    tensors = {file.stem: _tensors(file) for file in files}
    return Checkpoint(step, tensors, read_json(folder / STATE))


def read_marker(folder: Path) -> tuple[int, dict[str, str]]:
    """The step of a checkpoint, and the hashes of its files.

    Raises:
        CheckpointError: There is no marker, or it names files elsewhere.
    """
    marker = read_json(folder / MARKER)
    step, hashes = marker.get("step"), marker.get("sha256")
    if not isinstance(hashes, dict) or not isinstance(step, int):
        raise CheckpointError(f"{folder / MARKER}: not a marker that a checkpoint ends with")
    for name in hashes:
        if Path(name).name != name:
            raise CheckpointError(f"{folder}: the file {name!r} is missing")
    return step, hashes


def file_hash(file: Path) -> str:
    """Sha256 of a file."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: The file is missing or holds something else.
    """
    with naming(file):
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"expected a JSON object, got {type(content).__name__}")
        return content


def _tensors(file: Path) -> dict[str, Tensor]:
    with naming(file):
        return load_file(file)
