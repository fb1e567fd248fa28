import dataclasses
import math

import numpy as np
import pytest
import torch

from deltarule.models import CausalLM, ModelConfig
from deltarule.train.data import encode_documents
from deltarule.train.documents import DataError
from deltarule.train.evaluate import bits_per_byte
from deltarule.train.loop import LoopOptions
from deltarule.train.optimizer import OptimizerOptions
from experiments.text_cell import (
    TextCell,
    TextJob,
    equal_size,
    held_out_rows,
    measure,
    rows_at,
    text_model,
)

CPU = torch.device("cpu")
MODEL = ModelConfig(
    vocab_size=257, hidden_size=32, num_layers=1, num_heads=1, layer_types="gated_deltanet",
    mlp_size=32,
)  # fmt: skip
TEXT = "".join(f"{i} bottles of beer on the wall, {i} bottles of beer.\n" for i in range(400))


@pytest.fixture
def cell(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return TextCell(
        name="small-seed0", model=MODEL, length=32, rows=4, lengths=(32, 256), data=str(path),
        optimizer=OptimizerOptions(lr=1e-2, warmup_steps=5), held_out_bytes=1024,
        loop=LoopOptions(steps=40, evaluate_every=20, save_every=10), watched_bytes=256,
    )  # fmt: skip


def test_it_trains_and_measures_by_position(cell, tmp_path):
    figures = cell.run(tmp_path / "run", CPU)
    assert [step for step, _ in figures["curve"]] == [20, 40]
    assert figures["tokens"] == 40 * 4 * 32
    assert figures["data"]["bytes"] == len(TEXT)
    assert [len(heads) for heads in figures["horizons"]] == [1]
    short, far = (figures["evaluations"][str(length)] for length in cell.lengths)
    assert short["rows"] == 32
    assert far["rows"] == 4
    assert short["bits_per_byte"] < 4.0
    assert [last for _, last, _ in far["positions"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    weights = [last - first + 1 for first, last, _ in far["positions"]]
    mean = np.average([bits for *_, bits in far["positions"]], weights=weights)
    assert mean == pytest.approx(far["bits_per_byte"])


def test_an_mlp_cannot_make_a_model_smaller():
    with pytest.raises(ValueError, match="parameters must be at least"):
        equal_size(text_model("gated_deltanet", "laptop"), 1000)


def test_text_that_is_too_short_is_refused(cell, tmp_path):
    with pytest.raises(DataError, match="no held-out document"):
        dataclasses.replace(cell, lengths=(100_000,)).run(tmp_path / "run", CPU)
    with pytest.raises(DataError, match="fewer than one row"):
        dataclasses.replace(cell, length=100_000).run(tmp_path / "run", CPU)


def test_held_out_rows_stay_within_documents_and_spread_over_them():
    corpus = encode_documents([bytes([i]) * 25 for i in range(1, 9)])
    rows = held_out_rows(corpus, 10, 40)
    assert rows.tokens.shape == (4, 10)
    for targets in rows.labels:
        assert len(set(targets.tolist())) == 1
    assert len({row[0].item() for row in rows.labels}) == 4


def test_each_byte_of_training_is_the_answer_to_the_one_before(cell):
    corpus, loop = encode_documents([TEXT.encode()]), LoopOptions(accumulate=2)
    job = TextJob(cell.rows, cell.length, corpus, held_out_rows(corpus, 32, 64), loop)
    tokens, places, answers = job.next()
    assert tokens.shape == (2, 32)
    assert torch.equal(places, torch.arange(2 * 32))
    assert torch.equal(tokens[:, 1:], answers.reshape(2, 32)[:, :-1])
    assert not torch.equal(tokens, job.next()[0])
    loop = dataclasses.replace(loop, seed=1)
    other = TextJob(cell.rows, cell.length, corpus, held_out_rows(corpus, 32, 64), loop)
    assert not torch.equal(tokens, other.next()[0])


def test_the_measure_is_that_of_eval():
    model = CausalLM(MODEL).eval()
    corpus = encode_documents([TEXT.encode()[:640]])
    measured = measure(model, held_out_rows(corpus, 64, 10_000))
    assert measured["bits_per_byte"] == pytest.approx(bits_per_byte(model, corpus, 64), rel=1e-6)
    assert measured["standard_error"] > 0
    rounded = measure(model, held_out_rows(corpus, 64, 10_000), dtype="bfloat16")
    assert rounded["bits_per_byte"] == pytest.approx(measured["bits_per_byte"], rel=1e-2)
    assert rounded["bits_per_byte"] != measured["bits_per_byte"]
    alone = measure(model, rows_at(corpus, np.array([0]), 64))
    assert alone["standard_error"] is None
    assert math.isfinite(alone["bits_per_byte"])
