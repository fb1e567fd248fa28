"""The text and the needles of the experiments: the same bytes on every machine.

So losses can be compared. `text.tar.xz` beside this file holds the modules of CPython 3.11.7's
standard library, without its tests, IDLE, lib2to3, turtledemo, pydoc_data and ensurepip, and
CPython's licence, which allows this. `generate` draws rows of the task `niah` in its prose.
"""

import hashlib
import io
import tarfile
from functools import cache
from pathlib import Path

import numpy as np

from deltarule.tasks import niah
from deltarule.tasks.batch import Batch
from deltarule.tasks.niah import Prose, Split, prose_of
from deltarule.train.documents import DataError, Document, Documents

ARCHIVE = Path(__file__).with_name("text.tar.xz")
SHA256 = "f6d33c3ebbbce7133b6ef5dada7e3abd4a11ad3c766b49d610e446da5bedd346"
SOURCE = "modules of CPython 3.11.7"


@cache
def read_pinned_text(archive: Path = ARCHIVE) -> Documents:
    """Every module as a document, sorted by name.

    A `DataError` says that the archive is missing, or not the text that published results are of.
    """
    again = f"git checkout -- {archive.name}"
    try:
        packed = archive.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{archive}: missing; it is part of a checkout: {again}, or give a text of your own "
            "with --data"
        ) from None
    if hashlib.sha256(packed).hexdigest() != SHA256:
        raise DataError(
            f"{archive}: this is not the text of the published results (sha256 {SHA256[:12]}...); "
            f"{again} brings it back, --data takes any other text"
        )
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:xz") as files:
        texts = [
            Document(one.name, file.read())
            for one in files
            if one.name.endswith(".py") and (file := files.extractfile(one))
        ]
    return Documents(SOURCE, sorted(texts, key=lambda text: text.name))


@cache
def pinned_prose(split: Split) -> Prose:
    """The docstrings' sentences of one part of the text."""
    return prose_of(read_pinned_text().documents, split)


def generate(config: niah.Config, rng: np.random.Generator, rows: int) -> Batch:
    return niah.generate(config, rng, rows, pinned_prose)
