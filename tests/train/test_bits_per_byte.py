"""Bits per byte are the model's own log probabilities, whatever the packing, without leaks."""

import gzip
import lzma
import math
from pathlib import Path

import pytest
import torch

import deltarule.train.evaluate
from deltarule.models.bytes import BEGIN
from deltarule.train.data import encode_documents
from deltarule.train.evaluate import (
    bin_edges,
    bits_by_position,
    bits_per_byte,
    compressed_bits_per_byte,
    mean_bits,
)
from deltarule.train.sample import GenerateRun, sample_text
from deltarule.train.vocabulary import make_encoder
from small import small_model

TEXTS = [b"the first document", b"2nd", b"and a third one, which is the longest of the three"]


@pytest.fixture(params=["gated_deltanet", "attention"])
def model(request):
    return small_model(request.param)


@torch.no_grad()
def alone(model, text):
    """Nats of each byte of a document that the model reads by itself."""
    tokens = torch.tensor([[BEGIN, *text]])
    logits, _ = model(tokens[:, :-1])
    return -logits[0].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].double()


def test_packed_documents_cost_what_they_cost_alone(model):
    nats = torch.cat([alone(model, text) for text in TEXTS])
    expected = nats.sum().item() / math.log(2) / sum(map(len, TEXTS))
    assert bits_per_byte(model, encode_documents(TEXTS), 1000) == pytest.approx(expected, rel=1e-5)


def test_positions_sum_to_the_whole_and_bins_are_right(model):
    corpus = encode_documents(TEXTS)
    bins = bits_by_position(model, corpus, 20)
    assert sum(b.num_bytes for b in bins) == corpus.num_bytes
    assert mean_bits(bins) == pytest.approx(bits_per_byte(model, corpus, 20), rel=1e-6)
    whole = bits_by_position(model, encode_documents([TEXTS[2]]), 1000)
    nats = alone(model, TEXTS[2]) / math.log(2)
    for b in whole:
        expected = nats[b.first - 1 : b.last].mean().item()
        assert b.bits_per_byte == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 9, 2048])
def test_bins_cover_every_position_once(length):
    covered = [p for first, last in bin_edges(length) for p in range(first, last + 1)]
    assert covered == list(range(1, length + 1))


def test_every_nth_piece_is_read(model):
    corpus = encode_documents([bytes(range(40))])
    with torch.no_grad():
        tokens = torch.tensor([[BEGIN, *range(40)]])
        pieces = [model(tokens[:, i : i + 8])[0][0].log_softmax(-1) for i in (0, 24)]
    targets = [tokens[0, i + 1 : i + 9, None] for i in (0, 24)]
    nats = -sum(p.gather(1, t).sum().item() for p, t in zip(pieces, targets, strict=True))
    expected = nats / math.log(2) / 16
    assert bits_per_byte(model, corpus, 8, every=3) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="every"):
        bits_per_byte(model, corpus, 8, every=0)
    with pytest.raises(ValueError, match="corpus"):
        bits_by_position(model, encode_documents([]), 8)


def test_sample_gives_whole_characters_from_a_document_start_to_its_end():
    class Scripted:
        def stream(self, prompt, *, stop, **options):
            assert prompt == [BEGIN, 97]
            assert stop == [BEGIN]
            return iter([104, 195, 169, 226, BEGIN])

    pieces = list(sample_text(Scripted(), GenerateRun(Path()), "a", make_encoder(None)))
    assert "".join(pieces) == "h\xe9\ufffd"
    assert pieces[:3] == ["h", "", "\xe9"]


def test_compressors_in_blocks_see_the_bytes_of_all_documents_and_no_more(monkeypatch):
    monkeypatch.setattr(deltarule.train.evaluate, "BLOCK", 100)
    text = b"".join(b"%d bottles of beer\n" % i for i in range(2000))
    found = compressed_bits_per_byte(encode_documents([text[:500], text[500:]]))
    assert found["gzip"] == 8 * len(gzip.compress(text, compresslevel=9)) / len(text)
    assert found["xz"] == 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
