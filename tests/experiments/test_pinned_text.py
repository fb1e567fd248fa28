"""The text of the experiments is the same everywhere, and says so where it is not."""

import hashlib
import shutil
from pathlib import Path

import pytest

from deltarule.train.documents import DataError
from experiments.pinned_text import ARCHIVE, read_pinned_text


def test_names_and_bytes_are_those_of_every_other_machine():
    read = read_pinned_text()
    names = [document.name for document in read.documents]
    assert names == sorted(names)
    assert not any("test" in name.split("/") for name in names)
    whole = hashlib.sha256(b"".join(document.text for document in read.documents))
    assert (read.num_bytes, whole.hexdigest()[:16]) == (10_196_243, "2bd9488d34dfbafd")
    # The longest rows of an experiment have 32,768 bytes, within one document.
    assert sum(len(document.text) > 32_768 for document in read.documents) > 20


def test_another_text_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"missing; it is part of a checkout"):
        read_pinned_text(tmp_path / "text.tar.xz")
    damaged = Path(shutil.copy(ARCHIVE, tmp_path))
    with damaged.open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"not the text of the published results"):
        read_pinned_text(damaged)
