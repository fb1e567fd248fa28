"""Rows of a task come once each, the same for the same position, and scores are what they say."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from deltarule.tasks import groups, mqar
from deltarule.tasks.batch import NO_LABEL, Batch
from deltarule.train.labelled import (
    CHUNK,
    EVALUATION,
    Curriculum,
    DrawnAhead,
    LabelledJob,
    Rows,
    draw_rows,
    guesses_of,
    measure,
    read_of,
)
from small import small_model
from tolerance import assert_close

TASK = mqar.Config(length=8, pairs=2, vocab_size=8)


def plain_rows(length, stream):
    config = mqar.Config(length=length, pairs=2, vocab_size=8)
    return torch.from_numpy(mqar.generate(config, np.random.default_rng((3, stream)), 8).tokens)


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
    read, places, answers = read_of(Batch(labels, labels))
    assert (read.shape, places.tolist(), answers.tolist()) == ((1, 128), [70], [1])


@pytest.mark.parametrize(
    ("length", "shape", "places"),
    [(2, (3, 4), 8), (20, (3, 32), 64), (63, (3, 64), 192), (64, (3, 101), 256)],
)
def test_rows_filled_up_to_few_shapes_teach_what_they_hold(length, shape, places):
    batch = groups.generate(groups.Config("S_3", length), np.random.default_rng(0), rows=3)
    model, found = small_model(vocab_size=7, num_heads=2).double(), []
    weights = list(model.parameters())
    for read in (read_of(batch), read_of(batch, 100 - length)):
        loss, right = make_job().loss(model, *read)
        gradients = torch.autograd.grad(loss, weights)
        found.append(torch.cat([loss.reshape(1), right.reshape(1), *map(torch.flatten, gradients)]))
    assert_close(found[1], found[0], gradient=True)
    assert (read[0].shape, len(read[1]), len(set(read[1].tolist()))) == (shape, places, places)


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


def test_rows_that_threads_draw_are_those_of_their_streams_in_order():
    rows = draw_rows(mqar, TASK, seed=3, stream=7, rows=9 * CHUNK + 5)
    for first in range(0, len(rows.tokens), CHUNK):
        count = min(CHUNK, len(rows.tokens) - first)
        part = mqar.generate(TASK, np.random.default_rng((3, 7 + first)), count)
        assert same(Batch(*(x[first : first + count] for x in rows)), part)


def test_a_fixed_set_is_seen_once_an_epoch_in_another_order():
    job = make_job(examples=25)
    job.examples = Batch(*[np.arange(25)[:, None]] * 2)
    epochs = [[job.draw(3 * e + i, None)[0] for i in (1, 2, 3)] for e in range(3)]
    for epoch in epochs:
        assert len(set(torch.cat(epoch).flatten().tolist())) == 24
    assert (torch.cat(epochs[0]) != torch.cat(epochs[1])).any()
    # Going back is no problem: the order is a function of the epoch.
    assert (job.draw(1, None)[0] == epochs[0][0]).all()


@pytest.mark.parametrize("options", [{}, {"examples": 20}], ids=["new", "examples"])
def test_drawing_ahead_changes_no_row(options):
    plain, ahead = make_job(**options), make_job(**options, ahead=True)
    batches = [(plain.next(), ahead.next()) for _ in range(8)]
    assert all(same(a, b) for a, b in batches)
    ahead.seek({"drawn": 2})
    assert same(ahead.next(), batches[2][0])
    # Errors are passed on.
    with pytest.raises(ZeroDivisionError):
        DrawnAhead(lambda index, length: index / 0)(5, None)


def test_a_curriculum_grows_by_one_for_each_loss_below_the_threshold():
    jobs = [make_job(curriculum=Curriculum(8, 12, 0.5), ahead=ahead) for ahead in (False, True)]
    lengths = []
    for loss in (1.0, 0.4, 0.6, 0.1, 0.1):
        (tokens, _, answers), (filled, _, given) = (job.next() for job in jobs)
        lengths.append(jobs[0].length)
        # The same rows, filled up to a power of two or to the last length.
        assert filled.shape[1] in (8, 12)
        assert (filled[:, : tokens.shape[1]] == tokens).all()
        assert (given[given != NO_LABEL] == answers).all()
        for job in jobs:
            job.last_loss.fill_(loss)
    assert lengths == [8, 8, 9, 9, 10]
    for job in jobs:
        assert job.position() == {"drawn": 5, "length": 11}
        assert job.position() == {"drawn": 5, "length": 11}
        job.last_loss.fill_(0.1)
        assert job.position() == {"drawn": 5, "length": 12}
        job.last_loss.fill_(0.1)
        assert job.position() == {"drawn": 5, "length": 12}
        job.seek({"drawn": 1, "length": 9})
        assert (job.next()[0][:, :8] == plain_rows(9, 2)[:, :8]).all()


def test_parts_of_a_step_are_different_rows():
    job = make_job(accumulate=2)
    first, second = job.next(), job.next()
    assert first[0].shape == (4, 8)
    assert not same(first, second)
    assert job.batch_tokens == 64
    with pytest.raises(ValueError, match="multiple of accumulate=3, got 8"):
        make_job(accumulate=3)


def test_rows_of_evaluation_are_never_rows_of_training_and_the_loss_is_at_the_queries():
    job = make_job(curriculum=Curriculum(8, 9, 0.5))
    first = tokens, places, answers = job.next()
    assert not (tokens == job.draw(EVALUATION, 8)[0]).all()
    assert not (tokens == job.next()[0]).all()
    job.seek({"drawn": 0, "length": 8})
    assert (job.next()[0] == tokens).all()

    class Oracle:
        embedding = torch.nn.Embedding(8, 1)

        def hidden(self, given):
            says = torch.zeros(given.numel(), 8)
            says[places, answers] = 50.0
            return says.reshape(*given.shape, 8), None

        def logits(self, x):
            assert x.shape == (8 * 2, 8)
            return x

    loss, accuracy = job.loss(Oracle(), *job.tensors(first, torch.device("cpu")))
    assert loss.item() < 1e-6
    assert accuracy.item() == 1.0
    # What was learned makes the next rows longer.
    assert job.position() == {"drawn": 1, "length": 9}
