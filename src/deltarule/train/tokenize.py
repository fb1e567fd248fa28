"""`deltarule data`: text, jsonl or parquet of any size as token shards, in constant memory."""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from deltarule.nn.checks import check_least
from deltarule.train.documents import MINIMUM_BYTES, READERS, DataError, find_files, is_text
from deltarule.train.progress import make_progress
from deltarule.train.token_shards import INDEX, TRAINING, VALIDATION, Index, ShardWriter
from deltarule.train.vocabulary import Encoder, make_encoder

# A longer text file becomes several documents, each up to the end of a line.
LONGEST_BYTES = 8 * 2**20
# From here on the end of a document is held out, not one document in so many.
LONG_BYTES = 2**20
# Bytes that a tokenizer is given at once.
BATCH_BYTES = 2**20
# Steps of the bar.
PERCENT = 100


@dataclass(frozen=True)
class DataRun:
    """Write documents as token shards, which `deltarule train text --data FOLDER` maps."""

    source: Path
    """A file, or a folder that is searched: text (a document a file), .jsonl and .parquet."""
    out: Path = Path("tokens")
    """Folder to make; it appears when it is complete."""
    tokenizer: str | None = None
    """Name or folder of a Hugging Face tokenizer; None takes bytes as tokens."""
    text_field: str = "text"
    """Field of a line of .jsonl, or column of .parquet, that holds the text."""
    validation_fraction: float = 0.01
    """Share of the text that is never trained on."""
    shard_tokens: int = 2**28
    """Tokens after which another file is begun."""

    def __post_init__(self) -> None:
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction must lie between 0 and 1, got {self.validation_fraction}"
            )
        check_least(self, 1, "shard_tokens")


class Read(NamedTuple):
    """A document, and how many bytes of its file are read with it."""

    text: bytes
    done: int


def write_data(run: DataRun) -> None:
    """Tokenise all documents, with a bar that counts bytes; an error leaves nothing behind."""
    if run.out.exists():
        raise ValueError(f"--out {run.out}: it exists; remove it or give another folder")
    if not run.source.exists():
        raise DataError(f"{run.source}: there is no such file or folder")
    encoder = make_encoder(run.tokenizer)
    # What a run that was killed has left is written afresh.
    aside = run.out.with_name(f".{run.out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        index = _write(run, encoder, aside)
        encoder.save(aside)
        (aside / INDEX).write_text(json.dumps(dataclasses.asdict(index), indent=1))
        aside.replace(run.out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    for name, facts in ((TRAINING, index.training), (VALIDATION, index.validation)):
        counts = {"documents": facts.documents, "bytes": facts.bytes, "tokens": sum(facts.shards)}
        words = [f"{x:,} {what if x != 1 else what[:-1]}" for what, x in counts.items()]
        print(f"{name:<11}{', '.join(words)}")
    print(f"{run.out}: train with deltarule train text --data {run.out}")


def _write(run: DataRun, encoder: Encoder, folder: Path) -> Index:
    dtype: Literal["uint16", "uint32"] = "uint16" if encoder.vocab_size <= 2**16 else "uint32"
    runs: list[str] = []
    files = list(find_files(run.source, runs))
    with contextlib.ExitStack() as opened:
        sets = {
            name: opened.enter_context(
                contextlib.closing(ShardWriter(folder, name, dtype, run.shard_tokens))
            )
            for name in (TRAINING, VALIDATION)
        }
        _fill(run, encoder, files, sets)
    if sum(writer.bytes for writer in sets.values()) < MINIMUM_BYTES:
        raise DataError(f"{run.source}: below {MINIMUM_BYTES:,} bytes of text; give more")
    return Index(
        str(run.source), run.tokenizer, encoder.vocab_size, encoder.begin, dtype,
        sets[TRAINING].facts(), sets[VALIDATION].facts(),
    )  # fmt: skip


def _fill(run: DataRun, encoder: Encoder, files: list[Path], sets: dict[str, ShardWriter]) -> None:
    total = sum(file.stat().st_size for file in files)
    began = time.monotonic()
    left_out: list[str] = []
    with make_progress(PERCENT, what="percent") as bar:
        for batch, done in batches(files, run, left_out):
            texts = [text for text, _ in batch]
            for (text, name), tokens in zip(batch, encoder.encode(texts), strict=True):
                sets[name].add(np.concatenate([[encoder.begin], tokens]), len(text))
            rate = done / 1e6 / (time.monotonic() - began)
            shown = {"GB": f"{done / 1e9:.2f} of {total / 1e9:.2f}", "MB/s": f"{rate:.1f}"}
            bar.update(PERCENT * done // max(total, 1), shown)
        for name in left_out:
            bar.note(f"note: {name} is left out: neither text, .jsonl nor .parquet")


def batches(
    files: list[Path], run: DataRun, left_out: list[str]
) -> Iterator[tuple[list[tuple[bytes, str]], int]]:
    """Documents and the sets they go to, about a megabyte at a time, and the bytes read so far."""
    batch: list[tuple[bytes, str]] = []
    number, held, before, done = 0, 0, 0, 0
    for file in files:
        for text, within in documents_of(file, run.text_field, left_out):
            done = before + within
            if text:
                batch += divided(text, number, run.validation_fraction)
                number, held = number + 1, held + len(text)
            if held >= BATCH_BYTES:
                yield batch, done
                batch, held = [], 0
        before += file.stat().st_size
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


def documents_of(file: Path, field: str, left_out: list[str]) -> Iterator[Read]:
    if (rows := READERS.get(file.suffix)) is None:
        yield from text_file(file, left_out)
        return
    # How far a reader is in its file, it does not say: about as far as its texts are long.
    done, size = 0, file.stat().st_size
    for text in rows(file, field):
        done = min(done + len(text), size)
        yield Read(text, done)


def text_file(file: Path, left_out: list[str]) -> Iterator[Read]:
    """The file, or stretches of it that end with a line."""
    with file.open("rb") as opened:
        while text := opened.read(LONGEST_BYTES):
            if not is_text(text):
                left_out.append(file.name)
                return
            if len(text) == LONGEST_BYTES:
                text += opened.readline(LONGEST_BYTES)
            yield Read(text, opened.tell())
