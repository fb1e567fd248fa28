"""Text and needles of the experiments are the same everywhere, and say so where they are not."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deltarule.tasks import niah
from deltarule.train.documents import DataError
from experiments import pinned
from experiments.experiment import load_experiment
from experiments.pinned import ARCHIVE, SHA256, read_pinned_text
from experiments.records import plain

PROSE = {
    "training": (9_225, 643_983, "37de9916f176da6e"),
    "validation": (876, 61_405, "f7666623439bcd85"),
}


@pytest.mark.parametrize("split", PROSE)
def test_sentences_are_those_of_every_other_machine(split):
    sentences, starts = pinned.pinned_prose(split)
    whole = hashlib.sha256("\n".join(sentences).encode()).hexdigest()[:16]
    assert (len(sentences), starts[-1], whole) == PROSE[split]


def test_rows_are_those_of_every_other_machine():
    config = load_experiment("niah").cells("gpu")[0].training
    tokens, labels = pinned.generate(config, np.random.default_rng(0), rows=8)
    found = hashlib.sha256(tokens.tobytes() + labels.tobytes()).hexdigest()[:16]
    assert found == "c4692d8679e2af6d"


def test_a_cell_reads_no_other_text(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("read the library of the running Python")

    monkeypatch.setattr(niah, "read_documents", refuse)
    niah.read_prose.cache_clear()
    cell = load_experiment("niah").cells("laptop")[0]
    assert plain(cell)["text"] == SHA256
    tests = tuple(replace(one, rows=2) for one in cell.evaluations[:2])
    loop = replace(cell.loop, steps=1, evaluate_every=1)
    short = replace(cell, rows=2, watched_rows=2, loop=loop, evaluations=tests)
    assert short.run(tmp_path, torch.device("cpu"))["steps"] == 1


def test_another_text_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"missing; it is part of a checkout"):
        read_pinned_text(tmp_path / "text.tar.xz")
    damaged = Path(shutil.copy(ARCHIVE, tmp_path))
    with damaged.open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"not the text of the published results"):
        read_pinned_text(damaged)
