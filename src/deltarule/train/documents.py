"""Find the documents to train on: a file, a folder, or Python's own standard library."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Below this a split, a batch and a validation figure mean nothing.
MINIMUM_BYTES = 1_000
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "node_modules"}
# The control bytes that occur in text: tab, newline, form feed, carriage return, escape.
CONTROL = bytes(set(range(32)) - {9, 10, 12, 13, 27})
MOST_CONTROL = 0.02


class DataError(ValueError):
    """The data cannot be trained on; the message names the path and what to do."""


@dataclass(frozen=True)
class Document:
    """One text: a name relative to its corpus, and its bytes."""

    name: str
    text: bytes


@dataclass(frozen=True)
class Documents:
    """What was read, in the order of the names, and notes on what was left out."""

    source: str
    documents: list[Document]
    notes: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of all documents together."""
        return sum(len(document.text) for document in self.documents)

    @property
    def sha256(self) -> str:
        """A fingerprint of names and texts: a resumed run must see the same data."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{document.name}\0{len(document.text)}\0".encode(errors="replace"))
            digest.update(document.text)
        return digest.hexdigest()


def read_documents(path: str | Path | None = None, *, max_bytes: int = 500_000_000) -> Documents:
    """Read every text under a path.

    Args:
        path: A file, or a folder that is searched recursively; hidden files, installed packages
            and binary files are left out. None means the running Python's standard library.
        max_bytes: Stop reading once this many bytes are held, with a note.

    Returns:
        The documents, sorted by name.

    Raises:
        DataError: The path is missing, is empty, holds only binary files, or is too short.

    Examples:
        >>> read_documents().source.startswith("Python")
        True
    """
    files: Iterator[Path]
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        source = f"Python {platform.python_version()} standard library"
        files = (file for file in find_files(root) if file.suffix == ".py")
    else:
        root, source = Path(path).expanduser(), str(path)
        if not root.exists():
            raise DataError(f"--data {source}: there is no such file or folder")
        if not (root.is_file() or root.is_dir()):
            raise DataError(f"--data {source}: neither a file nor a folder; give one of them")
        files = find_files(root)
    return _checked(_read(files, root, source, max_bytes))


def find_files(root: Path) -> Iterator[Path]:
    """Regular files under a folder in a fixed order, or the file itself."""
    if root.is_file():
        yield root
        return
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS and f[0] != ".")
        for name in sorted(names):
            file = Path(folder, name)
            # A pipe or a device would block or never end; a dead link would fail.
            if name[0] != "." and file.is_file():
                yield file


def is_text(content: bytes) -> bool:
    """Text holds no zero byte and hardly any control bytes; any encoding of ASCII's kind passes.

    Examples:
        >>> is_text("naïve".encode("latin-1")), is_text(bytes(range(256)))
        (True, False)
    """
    if b"\0" in content:
        return False
    control = len(content) - len(content.translate(None, CONTROL))
    return control <= MOST_CONTROL * len(content)


def _read(files: Iterator[Path], root: Path, source: str, max_bytes: int) -> Documents:
    documents: list[Document] = []
    binary, unreadable, held = [], [], 0
    notes = []
    for file in files:
        if held >= max_bytes:
            notes.append(f"stopped reading at {held:,} bytes; --max-bytes sets the limit")
            break
        name = file.name if file == root else file.relative_to(root).as_posix()
        try:
            content = file.read_bytes()
        except OSError as error:
            unreadable.append(f"{name} ({error.strerror})")
            continue
        if not is_text(content):
            binary.append(name)
        elif content:
            documents.append(Document(name, content))
            held += len(content)
    notes += [f"{_count(binary, 'binary file')} left out: {_some(binary)}"] if binary else []
    notes += [f"{_count(unreadable, 'unreadable file')}: {_some(unreadable)}"] if unreadable else []
    return Documents(source, documents, notes)


def _checked(read: Documents) -> Documents:
    if read.documents and read.num_bytes >= MINIMUM_BYTES:
        return read
    where = f"--data {read.source}"
    aside = f" ({'; '.join(read.notes)})" if read.notes else ""
    if read.documents:
        raise DataError(
            f"{where}: too short, {read.num_bytes} bytes of text{aside}; "
            f"give at least {MINIMUM_BYTES:,} bytes, better a megabyte"
        )
    if read.notes:
        raise DataError(f"{where}: no readable text{aside}; give text in UTF-8 or plain ASCII")
    raise DataError(f"{where}: empty; give a text file, or a folder with text files in it")


def _count(names: list[str], what: str) -> str:
    return f"{len(names):,} {what}{'s' if len(names) > 1 else ''}"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown}, ..."


def split_documents(
    documents: list[Document], *, fraction: float = 0.1
) -> tuple[list[Document], list[Document]]:
    """Divide documents into training and validation, the same way every time.

    Whole documents go to validation in the order of a hash of their names, so that a document
    added later moves few others. A single file, or a few of very unequal length, cannot be divided
    so: then the last part of every document is validation.

    Args:
        documents: At least one.
        fraction: The share of bytes that becomes validation, in (0, 1).

    Returns:
        Training documents and validation documents, neither of them empty.

    Raises:
        ValueError: The fraction is not between 0 and 1.

    Examples:
        >>> train, validation = split_documents([Document("a", b"0123456789")])
        >>> train[0].text, validation[0].text
        (b'012345678', b'9')
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
        return _cut_ends(documents, fraction)
    training = [document for document in documents if document.name not in chosen]
    return training, [document for document in documents if document.name in chosen]


def _name_hash(document: Document) -> bytes:
    return hashlib.sha256(document.name.encode(errors="replace")).digest()


def _cut_ends(documents: list[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    training, validation = [], []
    for document in documents:
        cut = len(document.text) - round(fraction * len(document.text))
        training.append(Document(document.name, document.text[:cut]))
        validation.append(Document(f"{document.name} (end)", document.text[cut:]))
    return [d for d in training if d.text], [d for d in validation if d.text]


def limit_bytes(documents: list[Document], largest: int) -> list[Document]:
    """A sample of documents: in the order of a hash of their names, up to a number of bytes.

    None gives more than a sixteenth, where there are as many: one long file would speak for all.

    Examples:
        >>> limit_bytes([Document("a", b"0123456789")], 4)
        [Document(name='a', text=b'0123')]
    """
    share = largest // min(16, len(documents)) if documents else 0
    limited: list[Document] = []
    for document in sorted(documents, key=_name_hash):
        room = largest - sum(len(chosen.text) for chosen in limited)
        if room <= 0:
            break
        limited.append(Document(document.name, document.text[: min(room, share)]))
    return limited
