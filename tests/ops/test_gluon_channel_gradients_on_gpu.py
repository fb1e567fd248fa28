"""The gradients of chunks with a decay per channel in Gluon, and the forward that saves for them,
on an H100 or H200."""

from collections.abc import Iterator

import pytest
import torch

from deltarule.ops.delta_rule.gluon import gradient_stage, stage
from deltarule.ops.dispatch import forget_calls
from ops.test_gluon_gradients_on_gpu import check, hopper
from truth import (
    Drawn,
    Kind,
    assert_same,
    assert_same_again_and_alone,
    assert_same_under_load,
    draw,
    results,
    within_nan,
)

pytestmark = pytest.mark.gpu

__all__ = ["hopper"]


@pytest.fixture(autouse=True, params=["triton", "fused"])
def always(request, monkeypatch) -> Iterator[None]:
    """Small calls take them, too, behind either forward."""
    monkeypatch.setattr(gradient_stage, "LEAST_PAIRS", 0)
    monkeypatch.setattr(stage, "fills", lambda inputs, processors: request.param == "fused")
    forget_calls()
    yield
    forget_calls()


@pytest.fixture(params=["none", "tied"])
def kind(request) -> Kind:
    return Kind("channel", request.param, 1, torch.bfloat16)


def drawn_of(kind: Kind, **options: object) -> Drawn:
    sizes = {"key_size": 128, "value_size": 128, "tokens": 256, "heads": 16, "value_heads": 16}
    return draw(kind.case(**(sizes | options)))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("heads", [16, 8])
def test_gradients_are_as_near_to_float64_as_their_types_allow(kind, heads, normalize) -> None:
    check(drawn_of(kind, heads=heads, normalize_qk=normalize))


@pytest.mark.parametrize("sizes", [{"tokens": 150}, {"lengths": (3, 0, 70, 64)}, {"tokens": 1}])
def test_ragged_and_packed_calls_have_gradients(kind: Kind, sizes: dict) -> None:
    check(drawn_of(kind, **sizes))


@pytest.mark.parametrize("strong", [-3.0, -12.0, -1e4, -torch.inf])
def test_chunks_that_decay_too_far_are_written_again(kind: Kind, strong: float) -> None:
    drawn = drawn_of(kind)
    decay = drawn.case.tensors["log_decay"] * 0.05
    decay[:, 40:150, :, ::3] = strong
    check(drawn._replace(case=drawn.case.changed(log_decay=decay)))


def test_calls_that_are_cut_into_segments_have_gradients(kind: Kind) -> None:
    check(drawn_of(kind, heads=4, value_heads=4, tokens=1024))


def test_repeats_and_a_row_alone_have_the_same_bits(kind: Kind) -> None:
    assert_same_again_and_alone(drawn_of(kind, batch=3))


def test_nan_around_a_tensor_is_never_read(kind: Kind) -> None:
    drawn = drawn_of(kind)
    expected = results(drawn)
    assert_same(results(within_nan(drawn)), expected)


def test_many_runs_under_load_have_the_same_bits(kind: Kind) -> None:
    drawn = drawn_of(kind, batch=9, tokens=1024)
    assert_same_under_load(drawn)
