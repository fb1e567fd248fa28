"""Token shards: documents of any size on disk, which every process of a run maps.

    tokens.json               what is there; written last
    SET-00000.tokens, ...     whole documents end to end, uint16 or uint32
    SET.bounds                int64: where each document begins among all tokens of SET, and the end

SET is training or validation. `deltarule data` writes them in constant memory. Nothing is read
before a row needs it, and processes of a host share the pages. Which rows a step has is decided by
`ShuffledRows`, whatever the number of processes.
"""

import bisect
import contextlib
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deltarule.atomic_file import new_folder
from deltarule.json_file import fitted, parse_object, read_text
from deltarule.models.files import naming
from deltarule.nn.checks import check_least, check_that
from deltarule.train.data import Corpus, joined, taken
from deltarule.train.documents import MINIMUM_BYTES, READERS, DataError, find_files, is_text
from deltarule.train.progress import PERCENT, make_progress
from deltarule.train.vocabulary import Encoder, make_encoder

INDEX = "tokens.json"
TRAINING, VALIDATION = "training", "validation"
# A longer text file becomes several documents, each up to the end of a line.
LONGEST_BYTES = 8 * 2**20
# From here on the end of a document is held out, not one document in so many.
LONG_BYTES = 2**20
# Bytes that a tokenizer is given at once.
BATCH_BYTES = 2**20


@dataclass(frozen=True)
class DataRun:
    """Write documents as token shards, which `deltarule train text --data FOLDER` maps."""

    source: Path
    """A file, or a folder to search: text (a document per file), .jsonl and .parquet."""
    out: Path = Path("tokens")
    """Folder to make; it appears when it is complete."""
    tokenizer: str | None = None
    """Name or folder of a Hugging Face tokenizer; None takes bytes as tokens."""
    text_field: str = "text"
    """Field of .jsonl lines, or column of .parquet, that holds the text."""
    validation_fraction: float = 0.01
    """Share of the text held out of training."""
    shard_tokens: int = 2**28
    """Tokens in a file of shards."""

    def __post_init__(self) -> None:
        share = self.validation_fraction
        check_that(0 < share < 1, "validation_fraction must lie between 0 and 1", share)
        check_least(self, 1, "shard_tokens")


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
        self.sizes, self.tokens, self.documents, self.bytes = list[int](), 0, 0, 0
        self.digest = hashlib.sha256()
        self.bounds = (folder / f"{name}.bounds").open("wb")
        self.bounds.write(bytes(8))
        self.next_shard()

    def next_shard(self) -> None:
        self.shard = shard_file(self.folder, self.name, len(self.sizes)).open("wb")
        self.sizes.append(0)

    def add(self, tokens: NDArray[Any], num_bytes: int) -> None:
        """Append a document, its first token included, and count the bytes of its text."""
        if self.sizes[-1] >= self.most:
            self.shard.close()
            self.next_shard()
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
    """Documents up to a number of tokens in memory, `taken` in the same order every time."""
    order = np.random.default_rng(0).permutation(len(corpus.bounds) - 1)
    counts = taken(np.diff(corpus.bounds)[order] - 1, largest)
    some = counts > 0
    places = zip(corpus.bounds[order[some]].tolist(), counts[some].tolist(), strict=True)
    parts = [corpus.tokens[start : start + 1 + count] for start, count in places]
    # Bytes of the text as the tokens that were taken are to all.
    return joined(parts, round(corpus.num_bytes * int(counts.sum()) / max(1, corpus.predicted)))


def write_data(run: DataRun) -> None:
    """Tokenise all documents, with a bar that counts bytes; an error leaves nothing behind."""
    if run.out.exists():
        raise ValueError(f"--out {run.out}: it exists; remove it or give another folder")
    if not run.source.exists():
        raise DataError(f"{run.source}: there is no such file or folder")
    encoder = make_encoder(run.tokenizer)
    dtype: Literal["uint16", "uint32"] = "uint16" if encoder.vocab_size <= 2**16 else "uint32"
    with new_folder(run.out) as aside:
        with contextlib.ExitStack() as opened:
            sets = {}
            for name in (TRAINING, VALIDATION):
                sets[name] = ShardWriter(aside, name, dtype, run.shard_tokens)
                opened.callback(sets[name].close)
            fill(run, encoder, sets)
        if sum(writer.bytes for writer in sets.values()) < MINIMUM_BYTES:
            raise DataError(f"{run.source}: below {MINIMUM_BYTES:,} bytes of text; give more")
        index = Index(
            str(run.source), run.tokenizer, encoder.vocab_size, encoder.begin, dtype,
            sets[TRAINING].facts(), sets[VALIDATION].facts(),
        )  # fmt: skip
        encoder.save(aside)
        (aside / INDEX).write_text(json.dumps(dataclasses.asdict(index), indent=1))
    for name, facts in ((TRAINING, index.training), (VALIDATION, index.validation)):
        counts = {"documents": facts.documents, "bytes": facts.bytes, "tokens": sum(facts.shards)}
        words = [f"{x:,} {what if x != 1 else what[:-1]}" for what, x in counts.items()]
        print(f"{name:<11}{', '.join(words)}")
    print(f"{run.out}: train with deltarule train text --data {run.out}")


def fill(run: DataRun, encoder: Encoder, sets: dict[str, ShardWriter]) -> None:
    left_out: list[str] = []
    files = list(find_files(run.source, []))
    total, began = sum(file.stat().st_size for file in files), time.monotonic()
    with make_progress(PERCENT, what="percent") as bar:
        for batch, done in batches(files, run, left_out):
            texts = [text for text, _ in batch]
            for (text, name), tokens in zip(batch, encoder.encode(texts), strict=True):
                sets[name].add(np.concatenate([[encoder.begin], tokens]), len(text))
            rate = done / 1e6 / (time.monotonic() - began)
            bar.update_bytes(done, total, {"MB/s": f"{rate:.1f}"})
        for name in left_out:
            bar.note(f"note: {name} is left out: neither text, .jsonl nor .parquet")


def batches(
    files: list[Path], run: DataRun, left_out: list[str]
) -> Iterator[tuple[list[tuple[bytes, str]], int]]:
    """Documents and the sets they go to, about a megabyte at a time, and the bytes read so far."""
    batch: list[tuple[bytes, str]] = []
    number, held, done = 0, 0, 0
    for file in files:
        # How far a reader is in its file, it does not say: about as far as its texts are long.
        end = done + file.stat().st_size
        for text in filter(None, documents_of(file, run.text_field, left_out)):
            batch += divided(text, number, run.validation_fraction)
            number, held, done = number + 1, held + len(text), min(done + len(text), end)
            if held >= BATCH_BYTES:
                yield batch, done
                batch, held = [], 0
        done = end
    if batch:
        yield batch, done


def divided(text: bytes, number: int, fraction: float) -> list[tuple[bytes, str]]:
    """What of a document is trained on, and what is held out: a function of its number alone.

    One document in 1 / fraction is held out, and of the first and of long ones the end: then one
    document, or a few of very unequal length, are divided too.
    """
    if number and len(text) < LONG_BYTES:
        drawn = hashlib.blake2b(str(number).encode(), digest_size=8).digest()
        held_out = int.from_bytes(drawn) < fraction * 2**64
        return [(text, VALIDATION if held_out else TRAINING)]
    cut = len(text) - max(1, round(fraction * len(text)))
    # Not within a character of UTF-8.
    while cut and text[cut] & 0xC0 == 0x80:
        cut -= 1
    parts = (text[:cut], TRAINING), (text[cut:], VALIDATION)
    return [part for part in parts if part[0]]


def documents_of(file: Path, field: str, left_out: list[str]) -> Iterator[bytes]:
    """The documents of a file; of a text file itself, or stretches of it that end with a line."""
    if (rows := READERS.get(file.suffix)) is not None:
        yield from rows(file, field)
        return
    with file.open("rb") as opened:
        while text := opened.read(LONGEST_BYTES):
            if not is_text(text):
                left_out.append(file.name)
                return
            if len(text) == LONGEST_BYTES:
                text += opened.readline(LONGEST_BYTES)
            yield text
