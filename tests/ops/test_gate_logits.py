"""Logits in place of a step's gates: values, checks, and the registered operator."""

import pytest
import torch

from deltarule import BetaLogits, DecayLogits, recurrent_step
from logits import Logits, make_logits
from opchecked import opcheck_all
from ops.places import Place
from oracle import make_case
from tolerance import assert_close, relative_rms


def drawn_at(place: Place, *kind: object, **sizes: object) -> Logits:
    return make_logits(*kind, **{"dtype": place.dtype} | sizes).to(place.device)


def assert_equal_to_the_gates_made_first(drawn, place, bar=None, **options) -> None:
    state, exact = drawn.state(), drawn.exact()
    o = drawn.step(state, impl=place.impl, **options)
    if bar is None:
        assert_close(o, exact.o, dtype=place.dtype)
    else:
        assert relative_rms(o, exact.o) < bar
    assert_close(state, exact.final_state, dtype=state.dtype)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("tokens", "n_steps"), [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_logits_equal_the_gates_made_first(place, strided, tokens, n_steps, decay) -> None:
    sizes = {"strided": strided, "tokens": tokens, "key_size": 5}
    assert_equal_to_the_gates_made_first(drawn_at(place, decay, n_steps, **sizes), place)
    # The interpreter cuts bfloat16 where others round.
    for dtype in (torch.float16, torch.bfloat16)[: 1 if place.is_interpreted else 2]:
        drawn = drawn_at(place, decay, n_steps, dtype=dtype, **sizes)
        assert_equal_to_the_gates_made_first(drawn, place, torch.finfo(dtype).eps)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_a_decay_with_a_lower_bound(place, decay) -> None:
    drawn = drawn_at(place, decay)
    bounded = drawn._replace(decay=drawn.decay._replace(lower_bound=-5.0))
    assert_equal_to_the_gates_made_first(bounded, place)


def test_extreme_logits_make_finite_gates(place) -> None:
    drawn = drawn_at(place, "channel")
    # What numpy's exponential, the interpreter's, takes without a warning.
    for x, large in ((drawn.decay.logits, 1e4), (drawn.beta.logits, 80.0)):
        x[:, 0], x[:, 1] = large, -large
    assert_equal_to_the_gates_made_first(drawn, place)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_a_pool_with_a_null_slot(place, decay) -> None:
    drawn, given = drawn_at(place, decay, batch=3), {"device": place.device, "dtype": place.dtype}
    exact, pool = drawn.exact(), torch.randn(5, 4, 6, 8, **given)
    before = pool.clone()
    pool[[3, 1]] = drawn.state()[[0, 2]]
    indices = torch.tensor([3, -1, 1], device=place.device)
    o = drawn.step(pool, state_indices=indices, impl=place.impl)
    assert_close(o[::2], exact.o[::2], dtype=place.dtype)
    assert (o[1] == 0).all()
    assert_close(pool[[3, 1]], exact.final_state[[0, 2]], dtype=place.dtype)
    assert torch.equal(pool[[0, 2, 4]], before[[0, 2, 4]])


def test_one_gate_alone_and_beside_a_free_erase(place) -> None:
    drawn = drawn_at(place, "head")
    beta, log_decay = (x.to(place.dtype) for x in drawn.gates())
    pairs = [((drawn.beta, None), (beta, None)), ((None, drawn.decay), (None, log_decay)),
             ((beta, drawn.decay), (beta, log_decay))]  # fmt: skip
    for given, made in pairs:
        states = drawn.state(), drawn.state()
        o, expected = (
            drawn.call(state, *gates, impl=place.impl)
            for state, gates in zip(states, (given, made), strict=True)
        )
        assert_close(o, expected, dtype=place.dtype)
        assert_close(*states, dtype=place.dtype)
    free = place.put(make_case("head", "free", tokens=2)).tensors
    options = {"beta": None, "a": free["a"], "b": free["b"], "impl": place.impl}
    states = free["initial_state"].clone(), free["initial_state"].clone()
    o, expected = (
        recurrent_step(free["q"], free["k"], free["v"], log_decay=x, state=state, **options)
        for x, state in zip((drawn.decay, log_decay), states, strict=True)
    )
    assert_close(o, expected, dtype=place.dtype)
    assert_close(*states, dtype=place.dtype)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_with_logits(decay: str, device: str) -> None:
    drawn, indices = make_logits(decay, 2).to(device), torch.tensor([1, -1], device=device)
    names = opcheck_all(lambda: drawn.step(drawn.state(), state_indices=indices))
    # The gates are made inside.
    assert names == ["recurrent_step"]


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_step_with_logits_compiles(decay: str, device: str) -> None:
    torch._dynamo.reset()
    drawn = make_logits(decay, 2).to(device)
    x = drawn.case.tensors

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(state, beta, logits, A_log, dt_bias) -> torch.Tensor:
        return recurrent_step(
            x["q"], x["k"], x["v"], beta=BetaLogits(beta, 1.5),
            log_decay=DecayLogits(logits, A_log, dt_bias), n_steps=2, normalize_qk=True,
            state=state,
        )  # fmt: skip

    state, expected = drawn.state(), drawn.state()
    o = drawn.step(expected)
    assert torch.equal(step(state, drawn.beta.logits, *drawn.decay[:3]), o)
    assert torch.equal(state, expected)
