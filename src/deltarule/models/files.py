"""A model on disk: config.json and model.safetensors, each written whole; nothing is unpickled."""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deltarule.atomic_file import write_atomically, write_json
from deltarule.json_file import fitted, parse_object, read_text

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# How what Git leaves in the place of a large file begins.
LFS = b"version https://git-lfs"

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# What transformers puts before the names of a model with a head, and of one beside others.
_PREFIXES = ("model.", "language_model.")
_PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


class CheckpointError(ValueError):
    """A file of a checkpoint is missing, malformed or does not fit; the message names it."""


class Place(NamedTuple):
    """Where a tensor is stored: its file, its name there, its shape and its dtype."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        """Read the tensor; it lies in the file's memory, which may change."""
        with naming(self.path), safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(self.name)
        return tensor


def write_model(
    folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write config.json and model.safetensors; each is complete or as it was, even after a kill."""
    folder = Path(folder)
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file: a model is saved as a folder")
    folder.mkdir(parents=True, exist_ok=True)
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # Other readers of safetensors expect to be told which framework's layout it is.
    write_atomically(folder / WEIGHTS, lambda path: save_file(on_cpu, path, {"format": "pt"}))
    write_json(folder / CONFIG, config)


@contextmanager
def naming(path: Path, kind: type[ValueError] = CheckpointError) -> Iterator[None]:
    """Turn the errors of reading one file into one of a kind that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise kind(f"{path}: cannot be read: {error.strerror or error}") from error
    except KeyError as error:
        raise kind(f"{path}: missing field {error}") from error
    except (ValueError, TypeError, RuntimeError, OverflowError, SafetensorError) as error:
        lines = [line.strip() for line in str(error).splitlines()[:3]]
        raise kind(f"{path}: {' '.join(lines)}") from error


def read_config(folder: str | Path) -> dict[str, Any]:
    if not Path(folder).is_dir():
        absent = "no folder here; names on a hub are not looked up"
        why = "a file; give its folder" if Path(folder).is_file() else absent
        raise CheckpointError(f"{folder}: {why}")
    path = _inside(Path(folder), CONFIG)
    with naming(path):
        return parse_object(read_text(path))


def plain_name(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def read_places(folder: str | Path) -> dict[str, Place]:
    """Names and shapes of the tensors in model.safetensors, or in the shards of its index.

    No values are read. The `model.` that transformers puts before every name is left out. A
    `CheckpointError` says what is missing, malformed, truncated, a pickle or outside the folder, or
    which tensor is stored twice, elsewhere than the index says, or not floating-point.
    """
    places: dict[str, Place] = {}
    for path, names in _shards(Path(folder)).items():
        with naming(path):
            stored = _read_header(path)
            if names is not None and names != set(stored):
                raise ValueError(
                    f"does not hold the tensors that {INDEX} lists: {_difference(names, stored)}"
                )
            if twice := sorted(set(places) & set(stored)):
                raise ValueError(f"tensor {twice[0]!r} is stored in another file, too")
            places |= stored
    return places


def check_places(
    folder: str | Path,
    model_type: str,
    places: Mapping[str, Place],
    expected: Mapping[str, tuple[int, ...]],
) -> None:
    """Compare what is stored with what a model expects; a `CheckpointError` names what differs."""
    with naming(Path(folder)):
        if set(expected) != set(places):
            raise ValueError(
                f"does not fit {CONFIG} with model_type {model_type!r}: "
                f"{_difference(expected, places)}"
            )
    for name, shape in expected.items():
        path, stored, found, _ = places[name]
        if found != tuple(shape):
            raise CheckpointError(
                f"{path}: tensor {stored!r} has shape {list(found)}, but {CONFIG} asks for "
                f"{list(shape)}"
            )


def _shards(folder: Path) -> Mapping[Path, set[str] | None]:
    """Every file of weights, with the names that the index gives it; None without an index."""
    if os.path.lexists(folder / WEIGHTS):
        return {_inside(folder, WEIGHTS): None}
    if not os.path.lexists(folder / INDEX):
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_ENDINGS)
        if pickles:
            raise CheckpointError(
                f"{folder / pickles[0]}: looks like a pickle, which can run any code when it is "
                f"read and is never opened here; convert it to {WEIGHTS} where you trust it"
            )
        raise CheckpointError(f"{folder}: holds neither {WEIGHTS} nor {INDEX}")
    path = _inside(folder, INDEX)
    with naming(path):
        index = parse_object(read_text(path)).get("weight_map")
        weight_map: dict[str, str] = fitted(dict[str, str], index, "weight_map")
        if not weight_map:
            raise ValueError("weight_map names no tensor")
        shards: dict[str, set[str]] = {}
        for name, shard in weight_map.items():
            if not shard.endswith(".safetensors"):
                raise ValueError(
                    f"weight_map[{name!r}] must name a .safetensors file, got {shard!r}"
                )
            shards.setdefault(shard, set()).add(plain_name(name))
        return {_inside(folder, shard): names for shard, names in sorted(shards.items())}


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a regular file that lies in the folder itself, links followed."""
    path = folder / name
    if Path(name).name != name or "\\" in name or ":" in name or "\0" in name:
        raise CheckpointError(
            f"{folder}: the file name {name!r} leads out of the folder: shards must lie in it"
        )
    with naming(path):
        if not os.path.lexists(path):
            raise ValueError("no such file")
        if path.resolve(strict=True).parent != folder.resolve():
            raise ValueError("is a link that leads out of the folder; copy the file into it")
        if not path.is_file():
            raise ValueError("is not a regular file")
    return path


def _read_header(path: Path) -> dict[str, Place]:
    """Places by name, from a file that is a safetensors file from end to end."""
    with path.open("rb") as raw:
        start = raw.read(len(LFS))
    if start == LFS:
        raise ValueError("a Git LFS pointer, not the file: git lfs pull fetches it")
    if start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[8:9] != b"{"):
        raise ValueError(
            "is a pickle or a zip of one, which can run any code when it is read and is never "
            "opened here; convert it to safetensors where you trust it"
        )
    places: dict[str, Place] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, a file is no mapping
                tensor, plain = file.get_slice(name), plain_name(name)
                if (kind := tensor.get_dtype()) not in DTYPES:
                    raise ValueError(
                        f"tensor {name!r} is {kind}, expected one of {', '.join(DTYPES)}"
                    )
                if plain in places:
                    other = max(name, places[plain].name, key=len)
                    raise ValueError(f"tensor {plain!r} is stored twice, once as {other!r}")
                places[plain] = Place(path, name, tuple(tensor.get_shape()), DTYPES[kind])
    except SafetensorError as error:
        raise ValueError(f"truncated or malformed safetensors file: {error}") from error
    return places


def _difference(expected: Collection[str], stored: Mapping[str, Place]) -> str:
    """Name the first few tensors that only one side has, and the file of those stored."""
    parts = []
    for word, names in (
        ("missing", sorted(set(expected) - set(stored))),
        ("unexpected", sorted(set(stored) - set(expected))),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            place = f" in {stored[names[0]].path.name}" if word == "unexpected" else ""
            parts.append(f"{word} {', '.join(map(repr, names[:3]))}{more}{place}")
    return "; ".join(parts)
