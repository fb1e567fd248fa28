"""Token shards: documents of any size on disk, which every process of a run maps.

    tokens.json               what is there; written last
    SET-00000.tokens, ...     whole documents end to end, uint16 or uint32
    SET.bounds                int64: where each document begins among all tokens of SET, and the end

SET is training or validation. Nothing is read before a row needs it, and processes of a host share
the pages. Which rows a step has is decided by `ShuffledRows`, whatever the number of processes.
"""

import bisect
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltarule.train.data import Corpus
from deltarule.train.documents import DataError

INDEX, FORMAT = "tokens.json", 1
TRAINING, VALIDATION = "training", "validation"


class MappedTokens:
    """Shards end to end, as one array of which stretches inside a document are taken.

    Examples:
        >>> MappedTokens([np.array([1, 2]), np.array([3, 4, 5])])[3:5].tolist()
        [4, 5]
    """

    def __init__(self, shards: list[NDArray[Any]]) -> None:
        self.shards = shards
        self.starts = [0, *np.cumsum([len(shard) for shard in shards]).tolist()]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, span: slice) -> NDArray[Any]:
        """A stretch of one shard; no document lies in two."""
        shard = bisect.bisect_right(self.starts, span.start) - 1
        first = self.starts[shard]
        return self.shards[shard][span.start - first : span.stop - first]


class ShardWriter:
    """Appends the documents of one set to its shards, a document at a time.

    Args:
        folder: Where the files go; it exists.
        name: Of the set.
        dtype: Of a token.
        shard_tokens: A shard that has as many is followed by another.
    """

    def __init__(self, folder: Path, name: str, dtype: type, shard_tokens: int) -> None:
        self.folder, self.name, self.dtype, self.most = folder, name, dtype, shard_tokens
        self.sizes, self.tokens, self.documents, self.bytes = [0], 0, 0, 0
        self.digest = hashlib.sha256()
        self.bounds = (folder / f"{name}.bounds").open("wb")
        self.bounds.write(np.zeros(1, np.int64).tobytes())
        self.shard = shard_file(folder, name, 0).open("wb")

    def add(self, tokens: NDArray[Any], num_bytes: int) -> None:
        """Append a document, its first token included, and count the bytes of its text."""
        if self.sizes[-1] >= self.most:
            self.shard.close()
            self.shard = shard_file(self.folder, self.name, len(self.sizes)).open("wb")
            self.sizes.append(0)
        raw = tokens.astype(self.dtype).tobytes()
        self.shard.write(raw)
        self.digest.update(raw)
        self.sizes[-1] += len(tokens)
        self.tokens += len(tokens)
        self.documents, self.bytes = self.documents + 1, self.bytes + num_bytes
        self.bounds.write(self.tokens.to_bytes(8, sys.byteorder))

    def close(self) -> None:
        self.bounds.close()
        self.shard.close()

    def facts(self) -> dict[str, Any]:
        """What the index says of them."""
        return {
            "shards": self.sizes, "documents": self.documents, "bytes": self.bytes,
            "sha256": self.digest.hexdigest(),
        }  # fmt: skip


@dataclass(frozen=True)
class TokenFolder:
    """An open folder of shards: its index, and its two sets as mapped corpora."""

    index: dict[str, Any]
    training: Corpus
    validation: Corpus


def shard_file(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name}-{number:05}.tokens"


def is_token_folder(path: str | Path | None) -> bool:
    """Whether `deltarule data` wrote it."""
    return path is not None and (Path(path).expanduser() / INDEX).is_file()


def open_token_folder(path: str | Path) -> TokenFolder:
    """Map all shards of a folder.

    Args:
        path: What `deltarule data` wrote.

    Returns:
        Its index and its sets.

    Raises:
        DataError: A file is missing or not as long as the index says, or the index is no such.
    """
    folder = Path(path).expanduser()
    try:
        index = json.loads((folder / INDEX).read_text())
        if index["format"] != FORMAT:
            raise DataError(f"{folder / INDEX}: format {index['format']}, this reads {FORMAT}")
        training, validation = (_mapped(folder, index, name) for name in (TRAINING, VALIDATION))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise DataError(f"{folder / INDEX}: not of `deltarule data`: {error!r}") from error
    return TokenFolder(index, training, validation)


def _mapped(folder: Path, index: dict[str, Any], name: str) -> Corpus:
    facts = index[name]
    shards = [
        _map(shard_file(folder, name, number), np.dtype(index["dtype"]), size)
        for number, size in enumerate(facts["shards"])
    ]
    bounds = _map(folder / f"{name}.bounds", np.dtype(np.int64), facts["documents"] + 1)
    return Corpus(MappedTokens(shards), bounds, facts["bytes"])


def _map(file: Path, dtype: np.dtype[Any], size: int) -> NDArray[Any]:
    found = file.stat().st_size if file.is_file() else None
    if found != size * dtype.itemsize:
        there = "is not there" if found is None else f"has {found:,} bytes"
        raise DataError(f"{file} {there}, expected {size * dtype.itemsize:,}: write it again")
    # An empty file cannot be mapped.
    return np.memmap(file, dtype, "r") if size else np.zeros(0, dtype)


def sample_documents(corpus: Corpus, largest: int) -> Corpus:
    """Documents up to a number of tokens in memory, the same every time.

    None gives more than a sixteenth, where there are as many: one long file would speak for all.
    """
    count = len(corpus.bounds) - 1
    share = largest // min(16, count) if count else 0
    parts: list[NDArray[Any]] = []
    room = largest
    for document in np.random.default_rng(0).permutation(count):
        start, end = (int(bound) for bound in corpus.bounds[document : document + 2])
        end = min(end, start + 1 + min(room, share))
        if end - start < 2:
            break
        parts.append(corpus.tokens[start:end])
        room -= end - start - 1
    bounds = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.uint16)
    taken = len(tokens) - len(parts)
    text_bytes = None
    if corpus.text_bytes is not None:
        text_bytes = round(corpus.text_bytes * taken / max(1, corpus.predicted))
    return Corpus(tokens, bounds, text_bytes)
