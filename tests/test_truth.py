"""The properties that tests on a GPU ask for hold on a CPU, too: what says them is tried here."""

import pytest
import torch

import truth
from truth import FORMS, Kind, assert_alike, assert_same, draw, results

KINDS = [Kind("head", "tied", 2, torch.float32), Kind("channel", "free", 1, torch.float32)]


@pytest.fixture(params=KINDS, ids=str)
def kind(request, monkeypatch) -> Kind:
    monkeypatch.setattr(truth, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(truth, "IMPL", "torch")
    return request.param


def test_packed_sequences_and_rows_alone(kind) -> None:
    drawn = draw(kind.case(**FORMS["packed"]))
    together = results(drawn)
    for i in range(len(drawn.case.lengths)):
        own, alone = truth.own_part(drawn.case, together, i), results(drawn.sequence(i))
        assert_alike(own, {name: alone[name] for name in own}, kind.dtype)
    truth.assert_rows_alone(draw(kind.case(tokens=70)), [0])


def test_offsets_are_those_that_are_given(kind) -> None:
    drawn = draw(kind.case(**FORMS["packed"]))
    offsets = truth.offsets_of(drawn.case, truth.DEVICE)
    assert_same(results(drawn, cu_seqlens=offsets), results(drawn))


@pytest.mark.parametrize("form", FORMS)
def test_parts_values_around_and_tokens_to_come(kind, form) -> None:
    drawn = draw(kind.case(**FORMS[form]))
    assert_same(results(truth.within_nan(drawn)), whole := results(drawn))
    if form != "packed":
        parts = lambda case, x: truth.in_two_parts(case, x, 70)  # noqa: E731
        assert_alike(results(drawn, parts), whole, kind.dtype)
    run = lambda case: truth.call(case, case.tensors).o  # noqa: E731
    truth.assert_causal(drawn.case, run, [65], [3.0])
