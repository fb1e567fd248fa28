"""Find the documents to train on: a file, a folder, or Python's own standard library.

A line of a .jsonl file is one, and a row of a .parquet file.
"""

import hashlib
import mmap
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from deltarule.errors import reason
from deltarule.json_file import fitted, parse_object
from deltarule.train.data import taken
from deltarule.train.extra import MissingExtraError, require

# Held in memory, or mapped from a file.
Text = bytes | memoryview
# Beyond so many bytes, files of at least so many are mapped in place of read.
IN_MEMORY, MAPPED = 512_000_000, 1_000_000
# What is looked at or hashed at a time.
BLOCK = 2**24
# Files by which what our commands make is known: a run, or token shards.
MADE = (
    {"run.json", "metrics.jsonl"}, {"run.json", ".lock"}, {"metrics.jsonl", ".lock"},
    {"tokens.json", "training.bounds"},
)  # fmt: skip
# Below this a split, a batch and a validation figure mean nothing.
MINIMUM_BYTES = 1_000
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "node_modules"}
# The control bytes that occur in text: tab, newline, form feed, carriage return, escape.
CONTROL = bytes(set(range(32)) - {9, 10, 12, 13, 27})
MOST_CONTROL = 0.02
# Rows of a .parquet file that are in memory together, and bytes that are read of it at once.
BATCH, BUFFER = 64, 2**20
HINT = "; --text-field names the field with the text"


class DataError(ValueError):
    """The data cannot be trained on; the message names the path and what to do."""


@dataclass(frozen=True)
class Document:
    """One text: a name relative to its corpus, and its bytes."""

    name: str
    text: Text


@dataclass(frozen=True)
class Documents:
    """What was read, in the order of the names, and notes on what was left out."""

    source: str
    documents: list[Document]
    notes: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(len(document.text) for document in self.documents)

    @cached_property
    def sha256(self) -> str:
        """A fingerprint of names and texts: a resumed run must see the same data."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{document.name}\0{len(document.text)}\0".encode(errors="replace"))
            digest.update(document.text)
        return digest.hexdigest()


def read_documents(
    path: str | Path | None = None, *, max_bytes: int = 500_000_000, text_field: str = "text"
) -> Documents:
    """Read every text under a path, sorted by name; what would fill the memory stays in its file.

    A folder is searched recursively; hidden files, installed packages, folders of runs or shards
    and binary files are left out. Each row of a .jsonl or .parquet file is a document, which its
    `text_field` holds. No path means the running Python's standard library. What is beyond
    `max_bytes` is left out with a note.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        source = f"Python {platform.python_version()} standard library"
    else:
        root, source = Path(path).expanduser(), str(path)
        if not source or not root.exists():
            raise DataError(f"--data {source}: there is no such file or folder")
        if not (root.is_file() or root.is_dir()):
            raise DataError(f"--data {source}: neither a file nor a folder; give one of them")
    documents: list[Document] = []
    runs, binary, unreadable = list[str](), list[str](), list[str]()
    held = 0
    for file in find_files(root, runs):
        if path is None and file.suffix != ".py":
            continue
        name = file.name if file == root else file.relative_to(root).as_posix()
        try:
            rows = READERS.get(file.suffix)
            texts: Iterable[Text] = [] if rows is None else rows(file, text_field)
            if rows is None:
                texts = [read_bytes(file, max_bytes - held, held)]
            for number, text in enumerate(texts, 1):
                title = name if rows is None else f"{name}:{number}"
                content = text[: max_bytes - held]
                if not is_text(content):
                    binary.append(title)
                elif content:
                    documents.append(Document(title, content))
                    held += len(content)
                if held >= max_bytes:
                    break
        except OSError as error:
            unreadable.append(f"{name} ({error.strerror})")
        except DataError as error:
            if file == root:
                raise DataError(f"--data {error}") from None
            unreadable.append(f"{name} ({error})")
        if held >= max_bytes:
            break
    notes = []
    if held >= max_bytes:
        notes = [f"stopped reading at {held:,} bytes; --max-bytes sets the limit"]
    notes += notes_on(
        {
            "binary file{} left out": binary, "unreadable file{}": unreadable,
            "folder{} of runs or shards left out": runs,
        }
    )  # fmt: skip
    aside = f" ({'; '.join(notes)})" if notes else ""
    if 0 < held < MINIMUM_BYTES:
        raise DataError(
            f"--data {source}: too short, {held} bytes of text{aside}; "
            f"give at least {MINIMUM_BYTES:,} bytes, better a megabyte"
        )
    if not held:
        what = "empty; give a text file, or a folder with text files in it"
        what = f"no readable text{aside}; give text in UTF-8 or plain ASCII" if notes else what
        raise DataError(f"--data {source}: {what}")
    return Documents(source, documents, notes)


def notes_on(left_out: dict[str, list[str]]) -> Iterator[str]:
    for kind, names in left_out.items():
        # A name that is no text is shown all the same.
        some = [os.fsencode(name).decode(errors="backslashreplace") for name in names[:3]]
        some += ["..."] if len(names) > 3 else []
        count = f"{len(names):,} {kind.format('s' if len(names) > 1 else '')}"
        yield from [f"{count}: {', '.join(some)}"] if names else []


def find_files(root: Path, runs: list[str]) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS and f[0] != ".")
        # A run that read itself would be on other data each time.
        if any(marks <= set(names) for marks in MADE):
            runs.append(os.path.relpath(folder, root))
            folders.clear()
            continue
        for name in sorted(names):
            file = Path(folder, name)
            # A pipe or a device would block or never end; a dead link would fail.
            if name[0] != "." and file.is_file():
                yield file


def is_text(content: Text) -> bool:
    """Text holds no zero byte and hardly any control bytes; any encoding of ASCII's kind passes."""
    control = 0
    for start in range(0, len(content), BLOCK):
        block = bytes(content[start : start + BLOCK])
        if b"\0" in block:
            return False
        control += len(block) - len(block.translate(None, CONTROL))
    return control <= MOST_CONTROL * len(content)


def jsonl_texts(file: Path, field: str) -> Iterator[bytes]:
    """The texts of a file with a JSON object a line."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = parse_object(line.decode())
                if field not in row:
                    raise ValueError(f"no field {field!r} among {', '.join(row)}{HINT}")
                yield fitted(str, row[field], field).encode(errors="replace")
            except ValueError as error:
                raise DataError(f"{file}, line {number}: {reason(error)}") from None


def parquet_texts(file: Path, column: str) -> Iterator[bytes]:
    """The texts of a column of a .parquet file; rows without one are passed over."""
    try:
        arrow, parquet = require("pyarrow", "data"), require("pyarrow.parquet", "data")
    except MissingExtraError as error:
        raise MissingExtraError(f"{file}: {error}") from None
    try:
        # Read ahead, all that was read would stay until the end.
        opened = parquet.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False)
        names = opened.schema_arrow.names
        if column not in names:
            raise DataError(f"{file}: no column {column!r} among {', '.join(names)}{HINT}")
        for batch in opened.iter_batches(BATCH, columns=[column]):
            texts = batch.column(0).cast(arrow.binary()).to_pylist()
            yield from (text for text in texts if text is not None)
    except arrow.ArrowException as error:
        raise DataError(f"{file}: {reason(error)}") from None


READERS: dict[str, Callable[[Path, str], Iterator[bytes]]] = {
    ".jsonl": jsonl_texts, ".parquet": parquet_texts,
}  # fmt: skip


def read_bytes(file: Path, most: int, held: int) -> Text:
    """At most so many bytes of a file: mapped if they are many, and many are held already."""
    with file.open("rb") as opened:
        size = min(most, os.fstat(opened.fileno()).st_size)
        if size < MAPPED or held + size <= IN_MEMORY:
            return opened.read(most)
        return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))[:most]


def split_documents(
    documents: list[Document], *, fraction: float = 0.1
) -> tuple[list[Document], list[Document]]:
    """Divide documents into training and validation, the same way every time; neither is empty.

    Whole documents go to validation in the order of a hash of their names, so that a document
    added later moves few others, up to that fraction of the bytes. A single file, or a few of very
    unequal length, cannot be divided so: then the last part of every document is validation.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"validation_fraction must lie between 0 and 1, got {fraction}")
    wanted = fraction * sum(len(document.text) for document in documents)
    chosen: set[str] = set()
    held = 0
    for document in sorted(documents, key=_name_hash):
        if held < wanted and held + len(document.text) <= 1.5 * wanted:
            chosen.add(document.name)
            held += len(document.text)
    if held < 0.5 * wanted:
        cuts = [len(d.text) - round(fraction * len(d.text)) for d in documents]
        cut = list(zip(documents, cuts, strict=True))
        training = [Document(d.name, d.text[:end]) for d, end in cut]
        validation = [Document(f"{d.name} (end)", d.text[end:]) for d, end in cut]
        return [d for d in training if d.text], [d for d in validation if d.text]
    training = [document for document in documents if document.name not in chosen]
    return training, [document for document in documents if document.name in chosen]


def _name_hash(document: Document) -> bytes:
    return hashlib.sha256(document.name.encode(errors="replace")).digest()


def limit_bytes(documents: list[Document], largest: int) -> list[Document]:
    """A sample of documents: `taken` in the order of a hash of their names, so many bytes."""
    order = sorted(documents, key=_name_hash)
    counts = taken([len(document.text) for document in order], largest).tolist()
    parts = zip(order, counts, strict=True)
    return [Document(document.name, document.text[:n]) for document, n in parts if n]
