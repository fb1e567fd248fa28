"""Token shards: documents of any size on disk, which every process of a run maps.

    tokens.json               what is there; written last
    SET-00000.tokens, ...     whole documents end to end, uint16 or uint32
    SET.bounds                int64: where each document begins among all tokens of SET, and the end

SET is training or validation. Nothing is read before a row needs it, and processes of a host share
the pages. Which rows a step has is decided by `ShuffledRows`, whatever the number of processes.
"""

import bisect
import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deltarule.json_file import fitted, parse_object, read_text
from deltarule.models.files import naming
from deltarule.train.data import Corpus
from deltarule.train.documents import DataError

INDEX = "tokens.json"
TRAINING, VALIDATION = "training", "validation"


class MappedTokens:
    """Shards end to end, as one array of which stretches inside a document are taken."""

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
    """Appends the documents of one set to shards, the next of which begins at `shard_tokens`."""

    def __init__(self, folder: Path, name: str, dtype: str, shard_tokens: int) -> None:
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

    def facts(self) -> "SetFacts":
        return SetFacts(tuple(self.sizes), self.documents, self.bytes, self.digest.hexdigest())


@dataclass(frozen=True)
class SetFacts:
    """Tokens of each shard of a set, its documents, the bytes of their text, and a fingerprint."""

    shards: tuple[int, ...]
    documents: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """What tokens.json says."""

    source: str
    tokenizer: str | None
    """None: tokens are bytes."""
    vocab_size: int
    begin: int
    """The token that begins every document."""
    dtype: Literal["uint16", "uint32"]
    training: SetFacts
    validation: SetFacts
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        for facts in (self.training, self.validation):
            if min(*facts.shards, facts.documents, facts.bytes) < 0:
                raise ValueError("a size in it is below 0")
        if not 0 <= self.begin < self.vocab_size <= 2**32:
            raise ValueError(f"begin {self.begin} is no token of vocab_size {self.vocab_size}")


@dataclass(frozen=True)
class TokenFolder:
    """An open folder of shards: its index, and its two sets as mapped corpora."""

    index: Index
    training: Corpus
    validation: Corpus


def shard_file(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name}-{number:05}.tokens"


def is_token_folder(path: str | Path | None) -> bool:
    return path is not None and (Path(path).expanduser() / INDEX).is_file()


def open_token_folder(path: str | Path) -> TokenFolder:
    """Map all shards of a folder that `deltarule data` wrote.

    A `DataError` names a file that is missing or not as long as the index says.
    """
    folder = Path(path).expanduser()
    with naming(folder / INDEX, DataError):
        index: Index = fitted(Index, parse_object(read_text(folder / INDEX)))
    sets = ((TRAINING, index.training), (VALIDATION, index.validation))
    return TokenFolder(index, *(_mapped(folder, index.dtype, *one) for one in sets))


def _mapped(folder: Path, dtype: str, name: str, facts: SetFacts) -> Corpus:
    shards = [
        _map(shard_file(folder, name, number), np.dtype(dtype), size)
        for number, size in enumerate(facts.shards)
    ]
    file, total = folder / f"{name}.bounds", sum(facts.shards)
    bounds = _map(file, np.dtype(np.int64), facts.documents + 1)
    if (bounds[0], bounds[-1]) != (0, total) or (np.diff(bounds) < 1).any():
        raise DataError(f"{file} does not rise from 0 to {total:,}: write it again")
    return Corpus(MappedTokens(shards), bounds, facts.bytes)


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
