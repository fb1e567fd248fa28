"""Checkpoints that survive a kill at any moment: written aside, fsynced, marked, renamed.

With them is kept the state of every random generator that a run may draw from.
"""

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deltarule.atomic_file import new_folder
from deltarule.json_file import fitted, parse_object, read_text
from deltarule.models.files import CheckpointError, naming

MARKER = "COMPLETE"
STATE = "state.json"
# By name; moments of the optimizer are `exp_avg/NAME` and so on.
Tensors = dict[str, Tensor]
MOMENTS = ("exp_avg", "exp_avg_sq")
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


class Checkpoint(NamedTuple):
    """One whose files have the hashes they were written with: its step and its JSON state."""

    folder: Path
    step: int
    state: dict[str, Any]


class Checkpoints:
    """The folder `runs/NAME/checkpoints` and its `step-N`, of which it keeps the newest `keep`.

    Each is a `new_folder` with a marker of its files' hashes: a `step-N` is always whole, what a
    kill leaves behind is hidden, and the next start removes it. The step `spared` is kept whatever
    comes after it.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep must be 1 or more, got {keep}")
        self.folder, self.keep, self.spared = folder, keep, 0
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)

    def wait(self) -> None:
        """What was saved is on disk already."""

    def save(self, step: int, tensors: Tensors, state: dict[str, Any]) -> Path:
        """Write one checkpoint; afterwards it is on disk, or the whole ones are as they were."""
        whole = {key: x.detach().cpu().contiguous() for key, x in tensors.items()}
        with self.new(step) as aside:
            for name, kind in ((MODEL, False), (OPTIMIZER, True)):
                save_file(
                    {key: x for key, x in whole.items() if ("/" in key) == kind}, aside / name
                )
            mark(aside, step, json.dumps(state), hashes_of(aside.iterdir()))
        return self.folder / f"step-{step}"

    @contextlib.contextmanager
    def new(self, step: int) -> Iterator[Path]:
        """A folder aside, which becomes the checkpoint of a step; then the oldest ones go."""
        target = self.folder / f"step-{step}"
        # One of this step is damaged: otherwise the run would have gone on from it.
        damaged = self.folder / f"{target.name}.damaged"
        self.remove(damaged)
        with new_folder(target, damaged) as aside:
            yield aside
        self.remove(damaged)
        for old in self.steps()[: -self.keep]:
            if old != self.spared:
                self.remove(self.folder / f"step-{old}")

    def steps(self) -> list[int]:
        return checkpoint_steps(self.folder)

    def newest(self) -> Checkpoint | None:
        return newest_checkpoint(self.folder, self.read)

    def read(self, folder: Path, *, optimizer: bool = True) -> Checkpoint:
        return read_checkpoint(folder, optimizer=optimizer)

    def fill(self, folder: Path, wanted: Tensors) -> None:
        fill(folder, wanted)

    def remove(self, target: Path) -> None:
        """Hide a folder by renaming it first: a kill midway must not leave half of a `step-N`."""
        if target.exists():
            hidden = target.with_name(f".{target.name}.{os.getpid()}.old.tmp")
            shutil.rmtree(hidden, ignore_errors=True)
            target.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def checkpoint_steps(folder: Path) -> list[int]:
    steps = {step_of(path.parent) for path in folder.glob(f"step-*/{MARKER}")}
    return sorted(steps - {-1})


def newest_checkpoint(
    folder: Path,
    read: Callable[[Path], Checkpoint],
    steps: Sequence[int] | None = None,
    *,
    quiet: bool = False,
) -> Checkpoint | None:
    """The newest checkpoint that can be read, of these steps or of all there are, or None.

    If there are some, and every one of them is damaged, that is a `CheckpointError`.
    """
    failures: list[str] = []
    for step in reversed(checkpoint_steps(folder) if steps is None else steps):
        try:
            newest = read(folder / f"step-{step}")
        except ValueError as error:
            failures.append(str(error))
            continue
        for failure in failures if not quiet else ():
            print(f"note: skipped a damaged checkpoint: {failure}")
        return newest
    if failures:
        raise CheckpointError("no checkpoint can be read: " + "; ".join(failures))
    return None


def read_checkpoint(
    folder: Path, *, optimizer: bool = True, share: slice = slice(None)
) -> Checkpoint:
    """Check the hashes of a share of the files, and read all but the tensors."""
    step, hashes = read_marker(folder)
    for name in sorted(hashes)[share]:
        if name == OPTIMIZER and not optimizer:
            continue
        with naming(folder / name):
            if hashes_of([folder / name]) != {name: hashes[name]}:
                raise ValueError("damaged: its hash is not the one that was saved")
    return Checkpoint(folder, step, read_json(folder / STATE))


@dataclass(frozen=True)
class Marker:
    """What COMPLETE says: the step, the hash of each file, and one over both of these."""

    step: int
    sha256: dict[str, str]
    own_sha256: str = ""

    def hash(self) -> str:
        said = json.dumps([self.step, self.sha256], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()


def mark(folder: Path, step: int, state: str, hashes: dict[str, str]) -> None:
    """Add the JSON state to files with these hashes, and the marker of a checkpoint."""
    (folder / STATE).write_text(state)
    hashes = hashes | hashes_of([folder / STATE])
    marker = Marker(step, hashes, Marker(step, hashes).hash())
    (folder / MARKER).write_text(json.dumps(dataclasses.asdict(marker)))


def weights_and_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """What a checkpoint holds, split as it is.

    An optimizer that has not stepped gets moments of zero: they are there to be filled.
    """
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        state: Tensors = optimizer.state[parameter]
        if not state:
            state.update({kind: torch.zeros_like(parameter) for kind in MOMENTS})
            state["step"] = torch.tensor(0.0, device=parameter.device)
        found |= {f"{kind}/{name}": state[kind] for kind in MOMENTS}
    return found


def fill(folder: Path, wanted: Tensors) -> None:
    """Copy tensors of a checkpoint to those of the same names, from the parts if it has some."""
    if not (folder / MODEL).exists():
        # A run on one process does not need DTensor and its checkpoints.
        from deltarule.train.sharded_checkpoint import read_shards

        read_shards(folder, wanted)
        return
    found: Tensors = {}
    for file in (MODEL, OPTIMIZER) if any("/" in name for name in wanted) else (MODEL,):
        with naming(folder / file):
            found |= load_file(folder / file)
    for name in sorted(wanted.keys() ^ found.keys(), key=lambda name: ("/" in name, name)):
        # The number of steps, which older versions wrote, need not be asked for.
        if name in wanted or "/" not in name:
            raise CheckpointError(
                f"{folder}: not of this model: {name!r} is "
                + ("missing" if name in wanted else "there, and the model has none")
            )
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            shapes = f"{list(found[name].shape)}, in the model {list(tensor.shape)}"
            raise CheckpointError(f"{folder}: not of this model: {name!r} is {shapes}")
        tensor.detach().copy_(found[name])


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint's folder; -1 where there is none.

    Examples:
        >>> step_of(Path("checkpoints/step-12")), step_of(Path("step-012"))
        (12, -1)
    """
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() and f"step-{int(digits)}" == folder.name else -1


def read_marker(folder: Path) -> tuple[int, dict[str, str]]:
    with naming(folder / MARKER):
        marker: Marker = fitted(Marker, read_json(folder / MARKER))
        if marker.own_sha256 != marker.hash():
            raise ValueError("damaged: its hash is not the one that was saved")
        if marker.step != step_of(folder):
            raise ValueError(f"names step {marker.step}, unlike its folder: was it moved?")
        # What others leave there, such as .DS_Store, nobody reads.
        read = (path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
        if other := sorted(set(read) ^ set(marker.sha256)):
            what = "is missing" if other[0] in marker.sha256 else "is not one that it names"
            raise ValueError(f"the file {other[0]!r} {what}")
    return marker.step, marker.sha256


def hashes_of(files: Iterable[Path]) -> dict[str, str]:
    hashes = {}
    for file in sorted(files):
        with file.open("rb") as handle:
            hashes[file.name] = hashlib.file_digest(handle, "sha256").hexdigest()
    return hashes


def read_json(file: Path) -> dict[str, Any]:
    with naming(file):
        return parse_object(read_text(file))


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  code that a user adds may draw from the global one
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The state of Python's, numpy's and torch's generators.

    Examples:
        >>> before = random_state()
        >>> drawn = torch.rand(3)
        >>> restore_random_state(before)
        >>> bool((torch.rand(3) == drawn).all())
        True
    """
    version, words, gauss = random.getstate()
    name, keys, at, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(at), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()), "cuda": [_encode(state) for state in devices],
    }  # fmt: skip


def restore_random_state(state: dict[str, Any]) -> None:
    """Put the generators back; device states that this machine has no device for are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(_decode(state["torch"]))
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_decode(s) for s in state["cuda"]])


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
