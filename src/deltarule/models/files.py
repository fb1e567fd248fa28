"""A model on disk: config.json and model.safetensors, each written whole; nothing is unpickled."""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltarule.models.config import ModelConfig
from deltarule.nn.atomic_file import write_atomically

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# The format allows no longer header; without the check a damaged length could ask for any memory.
_LONGEST_HEADER = 100_000_000
_LONGEST_JSON = 100_000_000
_DTYPES = ("F64", "F32", "BF16", "F16")
# What transformers puts before every name.
_PREFIX = "model."
_PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


class CheckpointError(ValueError):
    """A file of a checkpoint is missing, malformed or does not fit; the message names it."""


def write_model(folder: str | Path, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors; each is complete or as it was, even after a kill.

    Args:
        folder: Made if absent.
        config: The model's configuration.
        tensors: The model's parameters by name.

    Example:
        >>> import tempfile
        >>> config = ModelConfig(vocab_size=2, hidden_size=4, num_layers=1, num_heads=1,
        ...                      layer_types="attention")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_model(folder, config, {"x": torch.zeros(2)})
        ...     print(sorted(path.name for path in Path(folder).iterdir()))
        ['config.json', 'model.safetensors']
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # Other readers of safetensors expect to be told which framework's layout it is.
    write_atomically(folder / WEIGHTS, lambda path: save_file(on_cpu, path, {"format": "pt"}))
    write_atomically(folder / CONFIG, lambda path: _write_text(path, config.to_json()))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn the errors of reading one file into a CheckpointError that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RuntimeError, OverflowError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_config(folder: str | Path) -> ModelConfig:
    """Read config.json.

    Args:
        folder: Holds config.json.

    Returns:
        The configuration.

    Raises:
        CheckpointError: The file is missing or malformed, or a field is refused.
    """
    path = _inside(Path(folder), CONFIG)
    with naming(path):
        return ModelConfig.from_json(_read_text(path))


def _read_text(path: Path) -> str:
    if path.stat().st_size > _LONGEST_JSON:
        raise ValueError(f"longer than {_LONGEST_JSON} bytes, which no such file is")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error}") from None


def read_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Read the names and shapes of all stored tensors, and none of their values.

    The `model.` that transformers puts before every name is left out.

    Args:
        folder: Holds model.safetensors, or model.safetensors.index.json and its shards.

    Returns:
        Shapes by name.

    Raises:
        CheckpointError: As for `read_tensors`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path, names in _shards(Path(folder)).items():
        with naming(path):
            stored = _read_header(path)
            if names is not None and names != set(stored):
                raise ValueError(
                    f"does not hold the tensors that {INDEX} says: {_difference(names, stored)}"
                )
            if twice := sorted(set(shapes) & set(stored)):
                raise ValueError(f"tensor {twice[0]!r} is stored in another file, too")
            shapes |= stored
    return shapes


def read_tensors(
    folder: str | Path,
    expected: Mapping[str, tuple[int, ...]],
    device: str | torch.device = "cpu",
) -> dict[str, Tensor]:
    """Read all tensors, or none: every name and shape is compared before a value is read.

    Args:
        folder: Holds model.safetensors, or model.safetensors.index.json and its shards.
        expected: The shape of every tensor, by name.
        device: Where the tensors go.

    Returns:
        Tensors by name, in the dtypes of the file.

    Raises:
        CheckpointError: A file is missing, malformed, truncated, a pickle or outside the folder;
            or a tensor is missing, unexpected, of another shape or not floating-point.
    """
    shards = _shards(Path(folder))
    stored = read_shapes(folder)
    with naming(Path(folder)):
        if set(expected) != set(stored):
            raise ValueError(f"does not fit {CONFIG}: {_difference(expected, stored)}")
        for name, shape in expected.items():
            if stored[name] != tuple(shape):
                raise ValueError(
                    f"tensor {name!r} has shape {list(stored[name])}, but {CONFIG} asks for "
                    f"{list(shape)}"
                )
    tensors: dict[str, Tensor] = {}
    for path in shards:
        with naming(path):
            # Copies: the file may be mapped, and it may change later.
            tensors |= {
                name.removeprefix(_PREFIX): tensor.to(device, copy=True)
                for name, tensor in load_file(path).items()
            }
    return tensors


def _shards(folder: Path) -> dict[Path, set[str] | None]:
    """Every file of weights, with the names that the index gives it; None without an index."""
    if os.path.lexists(folder / WEIGHTS):
        return {_inside(folder, WEIGHTS): None}
    if os.path.lexists(folder / INDEX):
        return _read_index(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; a model's folder holds {WEIGHTS}")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_ENDINGS)
    if pickles:
        raise CheckpointError(
            f"{folder / pickles[0]}: looks like a pickle, which can run any code when it is read "
            f"and is never opened here; convert it to {WEIGHTS} where you trust it"
        )
    raise CheckpointError(f"{folder}: holds neither {WEIGHTS} nor {INDEX}")


def _read_index(folder: Path) -> dict[Path, set[str] | None]:
    path = _inside(folder, INDEX)
    with naming(path):
        weight_map = _weight_map(_read_text(path))
        shards: dict[Path, set[str] | None] = {}
        for shard in sorted(set(weight_map.values())):
            names = {
                name.removeprefix(_PREFIX) for name, place in weight_map.items() if place == shard
            }
            shards[_inside(folder, shard)] = names
    return shards


def _weight_map(text: str) -> dict[str, str]:
    """The index's map from tensor names to file names."""
    try:
        index: Any = json.loads(text)
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError("expected an object with a 'weight_map' from tensor names to file names")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            raise ValueError(f"weight_map[{name!r}] must name a .safetensors file, got {shard!r}")
    return weight_map


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


def _read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name, from a file that is a safetensors file from end to end."""
    _check_start(path)
    shapes = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, a file is no mapping
                tensor = file.get_slice(name)
                if tensor.get_dtype() not in _DTYPES:
                    raise ValueError(
                        f"tensor {name!r} is {tensor.get_dtype()}, expected one of "
                        f"{', '.join(_DTYPES)}"
                    )
                plain = name.removeprefix(_PREFIX)
                if plain in shapes:
                    raise ValueError(
                        f"tensor {plain!r} is stored twice, once as {_PREFIX + plain!r}"
                    )
                shapes[plain] = tuple(tensor.get_shape())
    except SafetensorError as error:
        raise ValueError(f"truncated or malformed safetensors file: {error}") from error
    return shapes


def _check_start(path: Path) -> None:
    """Refuse pickles by name, and a header longer than its file, before anything is allocated."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(9)
    if start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[8:] != b"{"):
        raise ValueError(
            "is a pickle or a zip of one, which can run any code when it is read and is never "
            "opened here; convert it to safetensors where you trust it"
        )
    header = int.from_bytes(start[:8], "little")
    if size < 9 or header > size - 8 or header > _LONGEST_HEADER:
        raise ValueError(
            f"truncated or malformed safetensors file: {size} bytes cannot hold the header of "
            f"{header} bytes that it announces"
        )


def _difference(expected: Collection[str], stored: Collection[str]) -> str:
    """Name the first few tensors that only one side has."""
    parts = []
    for word, names in (
        ("missing", sorted(set(expected) - set(stored))),
        ("unexpected", sorted(set(stored) - set(expected))),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{word} {', '.join(map(repr, names[:3]))}{more}")
    return "; ".join(parts)
