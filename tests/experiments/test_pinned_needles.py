"""The needles' prose is the same everywhere, and cells read that one."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from deltarule.tasks import prose
from experiments import pinned_needles
from experiments.pinned_text import SHA256
from experiments.records import plain
from experiments.table import load_experiment

PROSE = {
    "training": (9_225, 643_983, "37de9916f176da6e"),
    "validation": (876, 61_405, "f7666623439bcd85"),
}


@pytest.mark.parametrize("split", PROSE)
def test_sentences_are_those_of_every_other_machine(split):
    sentences, starts = pinned_needles.pinned_prose(split)
    whole = hashlib.sha256("\n".join(sentences).encode()).hexdigest()[:16]
    assert (len(sentences), starts[-1], whole) == PROSE[split]


def test_rows_are_those_of_every_other_machine():
    config = load_experiment("niah").cells("gpu")[0].training
    tokens, labels = pinned_needles.generate(config, np.random.default_rng(0), rows=8)
    found = hashlib.sha256(tokens.tobytes() + labels.tobytes()).hexdigest()[:16]
    assert found == "c4692d8679e2af6d"


def test_a_cell_reads_no_other_text(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("read the library of the running Python")

    monkeypatch.setattr(prose, "read_documents", refuse)
    prose.read_prose.cache_clear()
    cell = load_experiment("niah").cells("laptop")[0]
    assert plain(cell)["text"] == SHA256
    short = replace(
        cell,
        rows=2,
        watched_rows=2,
        loop=replace(cell.loop, steps=1, evaluate_every=1),
        evaluations=tuple(replace(one, rows=2) for one in cell.evaluations[:2]),
    )
    assert short.run(tmp_path, torch.device("cpu"))["steps"] == 1
