"""Logits in place of a step's gates: values, checks, and the registered operator."""

import pytest
import torch
from torch.library import opcheck

from deltarule import BetaLogits, DecayLogits, recurrent_step
from deltarule.ops.delta_rule.step import step_op
from logits import make_logits
from oracle import make_case
from tolerance import assert_close, relative_rms

every_impl = pytest.mark.parametrize("impl", ["torch", "reference"])


@every_impl
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("tokens", "n_steps"), [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_logits_equal_the_gates_made_first(impl, strided, tokens, n_steps, decay) -> None:
    drawn = make_logits(decay, n_steps, torch.float64, strided=strided, tokens=tokens)
    state, exact = drawn.state(), drawn.exact()
    assert_close(drawn.step(state, impl=impl), exact.o)
    assert_close(state, exact.final_state)
    beta, log_decay = drawn.gates()
    again = drawn.state()
    assert_close(drawn.call(again, beta, log_decay, impl=impl), exact.o)
    assert_close(again, exact.final_state)


@every_impl
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_logits_are_mapped_in_float32(impl, dtype) -> None:
    drawn = make_logits("channel", 2, dtype)
    state, exact = drawn.state(), drawn.exact()
    o = drawn.step(state, impl=impl)
    assert relative_rms(o, exact.o) < torch.finfo(dtype).eps
    assert_close(state, exact.final_state)


@every_impl
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_a_decay_with_a_lower_bound(impl, decay) -> None:
    drawn = make_logits(decay, dtype=torch.float64)
    drawn = drawn._replace(decay=drawn.decay._replace(lower_bound=-5.0))
    state, exact = drawn.state(), drawn.exact()
    assert_close(drawn.step(state, impl=impl), exact.o)
    assert_close(state, exact.final_state)
    with pytest.raises(ValueError, match=r"log_decay.lower_bound must be a number < 0 or None"):
        drawn._replace(decay=drawn.decay._replace(lower_bound=1.0)).step(state, impl=impl)


@every_impl
def test_one_gate_alone_and_beside_a_free_erase(impl) -> None:
    drawn = make_logits("head", dtype=torch.float64)
    beta, log_decay = drawn.gates()
    pairs = [((drawn.beta, None), (beta, None)), ((None, drawn.decay), (None, log_decay)),
             ((beta, drawn.decay), (beta, log_decay))]  # fmt: skip
    for given, made in pairs:
        states = drawn.state(), drawn.state()
        o, expected = (
            drawn.call(state, *gates, impl=impl)
            for state, gates in zip(states, (given, made), strict=True)
        )
        assert_close(o, expected)
        assert_close(*states)
    free = make_case("head", "free", tokens=2).tensors
    options = {"beta": None, "a": free["a"], "b": free["b"], "impl": impl}
    states = free["initial_state"].clone(), free["initial_state"].clone()
    o, expected = (
        recurrent_step(free["q"], free["k"], free["v"], log_decay=x, state=state, **options)
        for x, state in zip((drawn.decay, log_decay), states, strict=True)
    )
    assert_close(o, expected)
    assert_close(*states)


@every_impl
def test_a_pool_with_a_null_slot(impl) -> None:
    drawn = make_logits("channel", dtype=torch.float64, batch=3)
    exact, pool = drawn.exact(), torch.randn(5, 4, 6, 8, dtype=torch.float64)
    before = pool.clone()
    pool[[3, 1]] = drawn.state()[[0, 2]]
    o = drawn.step(pool, state_indices=torch.tensor([3, -1, 1]), impl=impl)
    assert_close(o[::2], exact.o[::2])
    assert (o[1] == 0).all()
    assert_close(pool[[3, 1]], exact.final_state[[0, 2]])
    assert torch.equal(pool[[0, 2, 4]], before[[0, 2, 4]])


HEAD, CHANNEL = make_logits("head"), make_logits("channel")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(4)}, r"log_decay.logits must be \[B, T, HV\] = \[2, 2, 4\] or"),
        ({"logits": None}, "log_decay.logits must be a tensor, got NoneType"),
        ({"logits": torch.zeros(2, 2, 4).long()}, "log_decay.logits must be a floating-point"),
        ({"A_log": torch.zeros(2)}, r"log_decay.A_log must be \[HV\] = \[4\], got \[2\]"),
        ({"dt_bias": torch.zeros(4, 8)}, r"log_decay.dt_bias must be \[HV\] = \[4\], got \[4, 8\]"),
        ({"A_log": torch.zeros(4, device="meta")}, "log_decay.A_log is on meta, but q is on cpu"),
        ({"dt_bias": torch.zeros(4, requires_grad=True)}, "recurrent_step has no gradient"),
    ],
)
def test_decay_logits_name_what_is_wrong(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        HEAD.call(HEAD.state(), HEAD.beta, HEAD.decay._replace(**changes))


def test_a_bias_of_each_channel_goes_with_logits_of_each_channel() -> None:
    decay = CHANNEL.decay._replace(dt_bias=torch.zeros(4))
    with pytest.raises(ValueError, match=r"log_decay.dt_bias must be \[HV, K\] = \[4, 8\], got"):
        CHANNEL.call(CHANNEL.state(), CHANNEL.beta, decay)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(2, 4)}, r"beta.logits must be \[B, T\*n, HV\] = \[2, 2, 4\], got"),
        ({"logits": 1.0}, "beta.logits must be a tensor, got float"),
        ({"beta_max": torch.ones(4)}, "beta.beta_max must be a number, got Tensor"),
        ({"beta_max": True}, "beta.beta_max must be a number, got bool"),
    ],
)
def test_beta_logits_name_what_is_wrong(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        HEAD.call(HEAD.state(), HEAD.beta._replace(**changes), HEAD.decay)


def test_beta_logits_exclude_a_free_erase() -> None:
    erase = torch.zeros(2, 2, 4, 8)
    case = HEAD.case.tensors
    with pytest.raises(ValueError, match="beta and a, b exclude each other"):
        recurrent_step(
            case["q"], case["k"], case["v"], beta=HEAD.beta, a=erase, b=erase, state=HEAD.state()
        )


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_opcheck_with_logits(decay: str) -> None:
    drawn = make_logits(decay, 2)
    x, (logits, *parameters) = drawn.case.tensors, drawn.decay
    sequence = x["q"], x["k"], x["v"], drawn.beta.logits, None, None, logits
    indices = torch.tensor([1, -1])
    rest = drawn.state(), None, indices, 2, 0.5, True, -1, "torch", *parameters, 1.5
    assert set(opcheck(step_op, (*sequence, *rest)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_the_step_with_logits_compiles(decay: str) -> None:
    torch._dynamo.reset()
    drawn = make_logits(decay, 2)
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
