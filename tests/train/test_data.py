"""Pieces never mix documents, every byte is predicted once, and positions can be resumed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltarule.models.bytes import BEGIN
from deltarule.train.data import ShuffledRows, cut, encode_documents, rows_in_order

texts = st.lists(st.binary(min_size=0, max_size=40), min_size=1, max_size=6)


def spans(batch):
    return list(zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True))


@given(texts, st.integers(1, 50), st.integers(0, 3) | st.none())
@settings(max_examples=60, deadline=None)
def test_cut_predicts_every_byte_once_and_stays_inside_a_document(given_texts, length, seed):
    corpus = encode_documents(given_texts)
    rng = None if seed is None else np.random.default_rng(seed)
    starts, lengths = cut(corpus, length, rng)
    targets = [t for s, n in zip(starts, lengths, strict=True) for t in range(s + 1, s + n + 1)]
    is_byte = np.flatnonzero(corpus.tokens != BEGIN)
    assert targets == is_byte.tolist()
    assert all(1 <= n <= length for n in lengths)


def test_each_target_is_the_next_byte_of_the_same_document():
    corpus = encode_documents([b"abcdefghij" * 3, b"0123456789" * 3])
    batch = ShuffledRows(corpus, length=7, row_tokens=40, seed=0).next()
    for start, end in spans(batch):
        tokens, targets = batch.tokens[0, start:end].tolist(), batch.targets[0, start:end].tolist()
        assert tokens[1:] == targets[:-1]
        letters = {bytes([t]).isdigit() for t in [*tokens, *targets] if t != BEGIN}
        assert len(letters) == 1
    assert BEGIN not in batch.targets


def test_an_epoch_shows_every_byte_once_in_full_rows():
    corpus = encode_documents([bytes([i]) * (10 + 3 * i) for i in range(16)])
    total = corpus.num_bytes
    rows = ShuffledRows(corpus, length=8, row_tokens=total, seed=1)
    for _ in range(2):
        seen = torch.bincount(rows.next().targets[0], minlength=16).tolist()
        assert seen == [10 + 3 * i for i in range(16)]


def test_epochs_differ_in_cuts_and_order_and_seeds_differ():
    corpus = encode_documents([bytes(range(200))])

    def epochs(seed):
        rows = ShuffledRows(corpus, length=16, row_tokens=200, seed=seed)
        return [rows.next() for _ in range(2)]

    first, second = epochs(0)
    assert not torch.equal(first.tokens, second.tokens)
    assert first.cu_seqlens.tolist() != second.cu_seqlens.tolist()
    assert torch.equal(epochs(0)[1].tokens, second.tokens)
    assert not torch.equal(epochs(1)[0].tokens, first.tokens)


@pytest.mark.parametrize("stop", [0, 1, 3, 7, 20])
def test_seek_continues_with_the_very_next_token(stop):
    corpus = encode_documents([bytes(range(100)), b"x" * 33, b"yz"])

    def fresh():
        return ShuffledRows(corpus, length=9, row_tokens=31, seed=5)

    straight, stopped, resumed = fresh(), fresh(), fresh()
    batches = [straight.next() for _ in range(stop + 3)]
    for _ in range(stop):
        stopped.next()
    resumed.seek(stopped.position())
    for batch in batches[stop:]:
        assert all(torch.equal(x, y) for x, y in zip(batch, resumed.next(), strict=True))


@pytest.mark.parametrize(("length", "row_tokens"), [(5, 12), (100, 12), (3, 1000)])
def test_rows_in_order_hold_whole_pieces_and_every_byte(length, row_tokens):
    corpus = encode_documents([b"abcdefg" * 5, b"", b"z", b"0123456789"])
    batches = list(rows_in_order(corpus, length, row_tokens))
    predicted = b"".join(bytes(batch.targets[0].tolist()) for batch in batches)
    assert predicted == b"abcdefg" * 5 + b"z" + b"0123456789"
    for batch in batches:
        sizes = batch.cu_seqlens.diff()
        assert sizes.sum() <= row_tokens or len(sizes) == 1
        assert int(sizes.max()) <= length


def test_sizes_below_one_empty_corpora_and_positions_of_other_data_are_refused():
    corpus = encode_documents([b"abc"])
    with pytest.raises(ValueError, match="position"):
        ShuffledRows(corpus, length=2, row_tokens=2, seed=0).seek(
            {"epoch": 0, "piece": 9, "taken": 0}
        )
    with pytest.raises(ValueError, match="length"):
        cut(corpus, 0)
    with pytest.raises(ValueError, match="row_tokens"):
        ShuffledRows(corpus, length=1, row_tokens=0, seed=0)
    with pytest.raises(ValueError, match="corpus"):
        ShuffledRows(encode_documents([]), length=1, row_tokens=1, seed=0)
