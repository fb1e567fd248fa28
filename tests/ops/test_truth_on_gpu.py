"""DESIGN's properties of `delta_rule` and `dplr`, for every decay and erase, on a CUDA device."""

from functools import partial

import pytest
import torch

import truth
from truth import FORMS, TIMED, Drawn, Kind, assert_alike, assert_same, call, draw, placed, results

pytestmark = pytest.mark.gpu

ERASES = (("none", 1), ("tied", 1), ("tied", 2), ("tied", 3), ("tied", 4), ("free", 1))
GRID = [(decay, *erase) for decay in ("none", "head", "channel") for erase in ERASES]
GRID += [("constant", "none", 1), ("constant", "tied", 1)]
# float32 has kernels of its own; float16 those of bfloat16, but for decays of channels.
FULL = [("none", "none", 1), ("none", "tied", 2), ("head", "none", 1), ("head", "tied", 1)]
FULL += [("channel", "none", 1), ("channel", "tied", 1)]
FULL += [("head", "free", 1), ("channel", "free", 1)]
KINDS = [Kind(*kind, torch.bfloat16) for kind in GRID]
KINDS += [Kind(*kind, torch.float32) for kind in FULL]
KINDS += [Kind(*kind, torch.float16) for kind in (("head", "tied", 1), ("channel", "tied", 1))]

every_form = pytest.mark.parametrize("form", FORMS)
dense = pytest.mark.parametrize("form", ["whole", "ragged"])


# Of the module, so that the tests of one kind follow each other: what one compiles, all use.
@pytest.fixture(scope="module", params=KINDS, ids=str)
def kind(request) -> Kind:
    return request.param


@every_form
def test_repeated_runs_and_states_that_are_computed_again_change_no_bit(kind, form) -> None:
    drawn = draw(kind.case(**FORMS[form]))
    first = results(drawn)
    for options in ({}, {}, {}, {"save_states": False}):
        assert_same(results(drawn, **options), first)
    with torch.no_grad():
        o, state = call(drawn.case, drawn.case.tensors)
    assert torch.equal(o, first["o"])
    assert torch.equal(state, first["final_state"])


@dense
def test_a_row_alone_equals_the_row_in_a_batch_bitwise(kind: Kind, form: str) -> None:
    truth.assert_rows_alone(draw(kind.case(**FORMS[form], batch=3)), (0, 2))


def test_packed_sequences_equal_separate_ones(kind: Kind) -> None:
    drawn = draw(kind.case(**FORMS["packed"]))
    together = results(drawn)
    for i in range(len(drawn.case.lengths)):
        own, alone = truth.own_part(drawn.case, together, i), results(drawn.sequence(i))
        assert_alike(own, {name: alone[name] for name in own}, kind.dtype)


@every_form
def test_no_future_input_changes_the_past_bitwise(kind: Kind, form: str) -> None:
    case = placed(kind.case(**FORMS[form]))
    tokens = 1, 37, 64, 100, case.tensors["q"].shape[1] - 1
    truth.assert_causal(case, lambda case: call(case, case.tensors).o, tokens, (0.7, 20.0, 1e4))


@pytest.mark.parametrize("split", [37, 64])
def test_a_carried_state_equals_one_pass(kind: Kind, split: int) -> None:
    drawn = draw(kind.case(**FORMS["ragged"]))
    # A constant decay's gradient is a sum in which much cancels.
    drawn = drawn if kind.decay != "constant" else drawn._replace(case=spread(drawn.case))
    parts = results(drawn, partial(truth.in_two_parts, split=split))
    assert_alike(parts, results(drawn), kind.dtype)


def spread(case):
    """A constant decay, written out for every token."""
    x = case.tensors
    return case.changed(log_decay=x["log_decay"].repeat(*x["q"].shape[:2], 1))


@every_form
def test_what_nobody_reads_any_more_has_no_gradient(kind: Kind, form: str) -> None:
    drawn, last = draw(kind.case(**FORMS[form])), 37
    d_o, d_state = drawn.weights
    d_o[:, last:], d_state[:] = 0, 0
    gradients = results(drawn)
    for name in ("q", "k", "v", "beta", "a", "b"):
        if drawn.case.tensors[name] is not None:
            n = truth.rows_of(drawn.case, name)
            assert (gradients[f"d {name}"][:, last * n :] == 0).all(), name


def test_empty_tokens_change_nothing(kind: Kind) -> None:
    drawn = draw(kind.case(tokens=128))
    if kind.decay == "constant":
        drawn = drawn._replace(case=spread(drawn.case))
    x, padded = drawn.case.tensors, {}
    for name in TIMED:
        if x[name] is not None:
            n = truth.rows_of(drawn.case, name)
            zeros = torch.zeros_like(x[name][:, : 11 * n])
            padded[name] = torch.cat([zeros, x[name], zeros], 1)
    d_o, d_state = drawn.weights
    # Empty tokens write and erase nothing, but they read.
    zeros = torch.zeros_like(d_o[:, :11])
    longer = Drawn(drawn.case.changed(**padded), (torch.cat([zeros, d_o, zeros], 1), d_state))
    found, expected = results(longer), results(drawn)
    inner = truth.part(drawn.case, {name: found.get(f"d {name}") for name in TIMED}, slice(11, 139))
    own = {f"d {name}": x for name, x in inner.items() if x is not None}
    own |= {"o": found["o"][:, 11:139], "d initial_state": found["d initial_state"]}
    assert_alike(own | {"final_state": found["final_state"]}, expected, kind.dtype)


@every_form
def test_nan_around_a_tensor_is_never_read(kind: Kind, form: str) -> None:
    drawn = draw(kind.case(**FORMS[form]))
    assert_same(results(truth.within_nan(drawn)), results(drawn))


@every_form
def test_nan_stays_in_its_sequence_and_group_of_heads(kind: Kind, form: str) -> None:
    drawn = draw(kind.case(**FORMS[form]))
    expected = results(drawn)
    v, n = drawn.case.tensors["v"].clone(), kind.n_steps
    sequence, row, token = (2, 0, 40) if form == "packed" else (1, 1, 80)
    v[row, token * n, 2] = torch.nan
    found = results(drawn._replace(case=drawn.case.changed(v=v)))
    assert found["o"][row, token, 2].isnan().all()
    # Value heads 2 and 3 share a key head; the chunk in which a NaN stands may be lost before it.
    for name in [x for x in found if x != "d log_decay" or kind.decay != "constant"]:
        x, y = found[name], expected[name]
        heads = 1 if "state" in name else 2
        clean = x.narrow(heads, 0, x.shape[heads] // 2), y.narrow(heads, 0, y.shape[heads] // 2)
        assert torch.equal(*clean), name
        if "state" in name or form != "packed":
            others = [i for i in range(len(x)) if i != (sequence if "state" in name else row)]
            assert torch.equal(x[others], y[others]), name
        else:
            rows = n if name in ("d k", "d v", "d beta") else 1
            after = slice(73 * rows, None)
            assert torch.equal(x[:, after], y[:, after]), name
            assert torch.equal(x[:, : 3 * rows], y[:, : 3 * rows]), name
