"""Both passes through the scans of heads with 256 keys, on an H100 or H200."""

from collections.abc import Iterator

import pytest
import torch

from deltarule.ops.delta_rule.gluon import wide_scan_stage
from deltarule.ops.dispatch import forget_calls
from oracle import check_fused, check_fused_gradients
from truth import (
    FORMS,
    PER_HEAD,
    Drawn,
    Kind,
    assert_same,
    assert_same_again_and_alone,
    assert_same_under_load,
    draw,
    placed,
    results,
    within_nan,
)

pytestmark = pytest.mark.gpu

SIZES = {"key_size": 256, "value_size": 256, "heads": 2, "value_heads": 2}


@pytest.fixture(autouse=True)
def taken(monkeypatch) -> Iterator[list[bool]]:
    """Calls plan anew, and every test takes them; whether they went back."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("they are written for sm_90")
    directions, scans = [], wide_scan_stage.scans

    def counted(call, own, back) -> bool:
        directions.append(back)
        return scans(call, own, back)

    monkeypatch.setattr(wide_scan_stage, "scans", counted)
    forget_calls()
    yield directions
    assert {*directions} == {False, True}
    forget_calls()


@pytest.fixture(params=PER_HEAD, ids=str)
def kind(request) -> Kind:
    return request.param


def drawn_of(kind: Kind, **options: object) -> Drawn:
    return draw(kind.case(**(SIZES | options)))


def check(drawn: Drawn) -> None:
    found = results(drawn)
    case, (d_o, d_final) = placed(drawn.case, torch.device("cpu")), drawn.weights
    check_fused((found["o"], found["final_state"]), case)
    by_name = {name: found["d " + name] for name in case.present()}
    # Of few heads the largest of a gradient by beta or decay decide: a ratio that spreads.
    check_fused_gradients(by_name, case, (d_o.cpu(), d_final.cpu()), stress=True)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_both_passes_are_as_near_to_float64_as_their_types_allow(kind, form, normalize) -> None:
    check(drawn_of(kind, normalize_qk=normalize, **FORMS[form]))


@pytest.mark.parametrize("sizes", [{"value_size": 512}, {"value_heads": 4}, {"value_size": 128}])
def test_so_they_are_of_other_heads(kind, sizes) -> None:
    check(drawn_of(kind, tokens=150, **sizes))


@pytest.mark.parametrize("reset", [-torch.inf, -1e4])
def test_hard_resets(reset: float) -> None:
    drawn = drawn_of(Kind("head", "tied", 1, torch.bfloat16))
    decay = drawn.case.tensors["log_decay"] * 0.05
    decay = decay.masked_fill(torch.rand_like(decay) < 0.05, reset)
    check(drawn._replace(case=drawn.case.changed(log_decay=decay)))


@pytest.mark.parametrize("form", FORMS)
def test_nan_around_a_tensor_is_never_read(kind, form) -> None:
    drawn = drawn_of(kind, **FORMS[form])
    assert_same(results(within_nan(drawn)), results(drawn))


def test_repeats_and_a_row_alone_have_the_same_bits(kind) -> None:
    assert_same_again_and_alone(drawn_of(kind, batch=3))


def test_many_runs_under_load_have_the_same_bits() -> None:
    kind = Kind("head", "tied", 1, torch.bfloat16)
    assert_same_under_load(drawn_of(kind, batch=9, heads=8, value_heads=8, tokens=512))
