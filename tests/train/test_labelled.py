"""Rows of a task come once each, the same for the same position, and scores are what they say."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from deltarule.tasks import mqar
from deltarule.tasks.batch import NO_LABEL, Batch
from deltarule.train.labelled import (
    CHUNK,
    EVALUATION,
    Curriculum,
    DrawnAhead,
    LabelledJob,
    Revisited,
    Rows,
    draw_rows,
    guesses_of,
    measure,
    read_of,
)

TASK = mqar.Config(length=8, pairs=2, vocab_size=8)


def make_job(**options):
    training = Rows(
        TASK, 8, **{k: options.pop(k) for k in ("examples", "curriculum") if k in options}
    )
    return LabelledJob(mqar, training, Rows(TASK, 20), seed=3, **options)


def same(first, second):
    return all((a == b).all() for a, b in zip(first, second, strict=True))


class Echo:
    """A model that says, at each place, one more than the token it reads there."""

    embedding = torch.nn.Embedding(20, 1)

    def hidden(self, tokens):
        return torch.nn.functional.one_hot((tokens + 1) % 20, 20) * 50.0, None

    def logits(self, x):
        return x


def test_scores_count_labels_rows_and_prefixes():
    tokens = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    labels = np.array([[2, 3, NO_LABEL, 5], [6, 0, 8, NO_LABEL], [NO_LABEL, 0, 12, 13]])
    batch = Batch(tokens, labels)
    guesses = guesses_of(Echo(), batch)
    assert guesses.tolist() == [[2, 3, NO_LABEL, 5], [6, 7, 8, NO_LABEL], [NO_LABEL, 11, 12, 13]]
    figures = measure(Echo(), mqar, None, batch, prefixes=(1, 2, 3, 4))
    assert figures["accuracy"] == pytest.approx(7 / 9)
    assert figures["sequence_accuracy"] == pytest.approx(1 / 3)
    shares = [[1, 2 / 3], [2, 1 / 3], [3, 1 / 3], [4, 0.0]]
    assert figures["prefixes"] == [[n, pytest.approx(share)] for n, share in shares]
    # A task may score in its own way.
    task = SimpleNamespace(measure=lambda config, batch, guesses: {"accuracy": config, "other": 2})
    own = measure(Echo(), task, 0.5, batch, prefixes=(1, 2, 3, 4))
    assert own == figures | {"accuracy": 0.5, "other": 2}


def test_columns_after_the_last_label_are_read_to_the_end_of_a_block():
    labels = np.full((1, 200), NO_LABEL)
    labels[0, 70] = 1
    read, places, answers = read_of(Batch(labels, labels), torch.device("cpu"))
    assert (read.shape, places.tolist(), answers.tolist()) == ((1, 128), [70], [1])


def test_rows_drawn_in_chunks_keep_what_a_task_adds_to_them():
    class Legal(NamedTuple):
        tokens: np.ndarray
        labels: np.ndarray
        legal: np.ndarray

    def generate(config, rng, rows):
        x = rng.integers(100, size=(rows, 4))
        return Legal(x, x, x[:, :2])

    task = type("Task", (), {"generate": staticmethod(generate)})
    rows = draw_rows(task, None, seed=0, stream=EVALUATION, rows=CHUNK + 5)
    assert rows.legal.shape == (CHUNK + 5, 2)
    assert len({tuple(row) for row in rows.tokens}) > CHUNK
    draw_rows.cache_clear()
    assert same(rows, draw_rows(task, None, seed=0, stream=EVALUATION, rows=CHUNK + 5))
    assert not same(rows, draw_rows(task, None, seed=1, stream=EVALUATION, rows=CHUNK + 5))


def test_a_fixed_set_is_seen_once_an_epoch_in_another_order():
    rows = np.arange(10)[:, None]
    draw = Revisited(Batch(rows, rows), count=3, seed=0)
    epochs = [np.concatenate([draw(3 * e + i).tokens for i in (1, 2, 3)]).ravel() for e in range(3)]
    for epoch in epochs:
        assert len(set(epoch.tolist())) == 9
    assert (epochs[0] != epochs[1]).any()
    # Going back is no problem: the order is a function of the epoch.
    assert (draw(1).tokens.ravel() == epochs[0][:3]).all()


@pytest.mark.parametrize("options", [{}, {"examples": 20}], ids=["new", "examples"])
def test_drawing_ahead_changes_no_row(options):
    plain, ahead = make_job(**options), make_job(**options, ahead=True)
    batches = [(plain.next(), ahead.next()) for _ in range(8)]
    assert all(same(a, b) for a, b in batches)
    ahead.seek({"drawn": 2})
    assert same(ahead.next(), batches[2][0])
    # Errors are passed on.
    with pytest.raises(ZeroDivisionError):
        DrawnAhead(lambda index: index / 0)(5)


def test_a_curriculum_grows_by_one_for_each_loss_below_the_threshold():
    job = make_job(curriculum=Curriculum(8, 12, 0.5))
    lengths = []
    for loss in (1.0, 0.4, 0.6, 0.1, 0.1):
        lengths.append(job.next().tokens.shape[1])
        job.last_loss = torch.tensor(loss)
    assert lengths == [8, 8, 9, 9, 10]
    assert job.position() == {"drawn": 5, "length": 11}
    assert job.position() == {"drawn": 5, "length": 11}
    job.seek({"drawn": 1, "length": 9})
    assert job.next().tokens.shape == (8, 9)


def test_parts_of_a_step_are_different_rows():
    job = make_job(accumulate=2)
    first, second = job.next(), job.next()
    assert first.tokens.shape == (4, 8)
    assert not same(first, second)
    assert job.batch_tokens == 64
    with pytest.raises(ValueError, match="multiple of accumulate=3, got 8"):
        make_job(accumulate=3)
