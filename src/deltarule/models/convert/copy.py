"""From one layout of a checkpoint to another, tensor by tensor: the model is never in memory."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.atomic_file import new_folder, write_json
from deltarule.models import files
from deltarule.models.causal_lm import without_memory
from deltarule.models.convert.layout import Layout, shapes_of, stored, written
from deltarule.models.convert.names import Piece, Shapes

# What stands beside a model for its tokens, and is the same in every layout.
_BESIDE = (
    "added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt",
    "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "vocab.json",
)  # fmt: skip
_NAMES = {dtype: name for name, dtype in files.DTYPES.items()}


class Entry(NamedTuple):
    """A tensor to write: the piece, its shape and its dtype."""

    piece: Piece
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def convert(
    source: str | Path,
    destination: str | Path,
    family: str | None = None,
    *,
    shard_size: int = 5_000_000_000,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a checkpoint of any known family in the layout of another.

    One tensor is in memory at a time. Values keep their dtypes. Files of a tokenizer are copied.

    Args:
        source: A folder that `CausalLM.load` reads.
        destination: A folder that does not exist yet; it appears when it is complete.
        family: A key of `deltarule.models.FAMILIES`. None: this library's own layout.
        shard_size: Bytes of tensors in one file, 1 or more; beyond them there are several files
            and an index.
        progress: Takes the bytes that are written and those of all tensors, after each tensor.

    Raises:
        CheckpointError: As for `CausalLM.load`.
        ValueError: As for `CausalLM.save`, or the destination exists.

    Examples:
        >>> import tempfile
        >>> from deltarule.models import CausalLM, ModelConfig
        >>> config = ModelConfig(vocab_size=9, hidden_size=32, num_layers=1, num_heads=2,
        ...                      layer_types="kda", mlp_size=64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     CausalLM(config).save(f"{folder}/a")
        ...     convert(f"{folder}/a", f"{folder}/b", "kda")
        ...     CausalLM.load(f"{folder}/b").config.layer_types
        ('kda',)
    """
    if shard_size < 1:
        raise ValueError(f"shard_size must be 1 or more, got {shard_size}")
    found, model = stored(source, without_memory)
    target = written(model, family, without_memory)
    parts = Parts(found, shapes := shapes_of(model))
    entries = [Entry(piece, piece.shape(shapes), parts.dtype(piece)) for piece in target.pieces]
    total, done = sum(entry.size for entry in entries), 0
    with new_folder(Path(destination)) as folder:
        shards = list(shared_out(entries, shard_size))
        weight_map: dict[str, str] = {}
        for index, shard in enumerate(shards, 1):
            name = f"model-{index:05}-of-{len(shards):05}.safetensors"
            name = files.WEIGHTS if len(shards) == 1 else name
            weight_map |= dict.fromkeys((entry.piece.name for entry in shard), name)
            for size in write_shard(folder / name, shard, parts):
                done += size
                if progress is not None:
                    progress(done, total)
        if len(shards) > 1:
            index_of = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(folder / files.INDEX, index_of)
        write_json(folder / files.CONFIG, target.fields)
        for name in _BESIDE:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, folder / name)


class Parts:
    """The parameters of a stored model by name, read where they lie."""

    def __init__(self, layout: Layout, shapes: Shapes) -> None:
        self._places, self._shapes = layout.places, shapes
        self._pieces: dict[str, list[Piece]] = {}
        for piece in layout.pieces:
            for part in piece.parts:
                self._pieces.setdefault(part, []).append(piece)
        # Parameters of one piece, and pieces of one parameter, usually follow one another.
        self._last: dict[str, Tensor] = {}

    def dtype(self, piece: Piece) -> torch.dtype:
        """The dtype that holds every part of a piece to write."""
        places = (self._place(self._pieces[part][0]) for part in piece.parts)
        return reduce(torch.promote_types, (place.dtype for place in places))

    def read(self, part: str) -> Tensor:
        if part not in self._last:
            self._last = {}
            for piece in self._pieces[part]:
                place = self._place(piece)
                with files.naming(place.path):
                    piece.read(place.read(), self._shapes, self._last)
        return self._last[part]

    def _place(self, piece: Piece) -> files.Place:
        return self._places[files.plain_name(piece.name)]


def shared_out(entries: list[Entry], shard_size: int) -> Iterator[list[Entry]]:
    """Cut the tensors, in their order, into files of at most so many bytes or of one tensor."""
    shard: list[Entry] = []
    size = 0
    for entry in entries:
        if shard and size + entry.size > shard_size:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += entry.size
    yield shard


def write_shard(path: Path, entries: list[Entry], parts: Parts) -> Iterator[int]:
    """Write a safetensors file; yield the bytes of each tensor once it is written.

    Eight bytes of length, then JSON, filled up with spaces to a multiple of eight, then tensors.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        offsets = [start, start + entry.size]
        described = {"dtype": _NAMES[entry.dtype], "shape": entry.shape, "data_offsets": offsets}
        header[entry.piece.name], start = described, offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            tensor = entry.piece.write([parts.read(part) for part in entry.piece.parts])
            tensor = tensor.to(entry.dtype).contiguous().flatten().view(torch.uint8)
            values: Any = tensor.numpy()
            file.write(values)
            # The next is read without it.
            del tensor, values
            yield entry.size
