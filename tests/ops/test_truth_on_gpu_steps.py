"""DESIGN's properties of `recurrent_step` on a CUDA device."""

import pytest
import torch
from torch import Tensor

import truth
from deltarule import BetaLogits, recurrent_step
from logits import make_logits
from opchecked import opcheck_all
from truth import Drawn, Kind, captured, draw, held, late, surrounded, waits_for_nothing

pytestmark = pytest.mark.gpu

KINDS = [
    Kind("none", "none", 1, torch.bfloat16), Kind("head", "tied", 3, torch.bfloat16),
    Kind("channel", "tied", 1, torch.float16), Kind("channel", "free", 1, torch.bfloat16),
    Kind("constant", "tied", 1, torch.float32), Kind("head", "free", 1, torch.float32),
]  # fmt: skip
CONTRACTS = ("test_schema", "test_autograd_registration", "test_faketensor")
STATES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def kind(request) -> Kind:
    return request.param


def step(drawn: Drawn, state: Tensor, **options: object) -> Tensor:
    x = drawn.case.tensors
    return recurrent_step(
        *(x[name] for name in ("q", "k", "v")),
        **{name: x[name] for name in ("beta", "a", "b", "log_decay")},
        n_steps=drawn.case.n_steps, state=state, impl=truth.IMPL, **options,
    )  # fmt: skip


def state_of(drawn: Drawn, dtype: torch.dtype) -> Tensor:
    return drawn.case.tensors["initial_state"].to(dtype, copy=True)


@pytest.mark.parametrize("dtype", STATES, ids=str)
def test_steps_are_equal_bitwise_alone_and_repeated(kind: Kind, dtype: torch.dtype) -> None:
    drawn = draw(kind.case(batch=3, tokens=4))
    state, again = state_of(drawn, dtype), state_of(drawn, dtype)
    o = step(drawn, state)
    assert torch.equal(step(drawn, again), o)
    assert torch.equal(again, state)
    for i in range(3):
        row = drawn.rows(slice(i, i + 1))
        own = state_of(row, dtype)
        assert torch.equal(step(row, own), o[i : i + 1])
        assert torch.equal(own, state[i : i + 1])


def test_nan_elsewhere_is_never_read(kind: Kind) -> None:
    drawn = draw(kind.case(tokens=2, key_size=40, value_size=20))
    expected = state_of(drawn, torch.float32)
    o = step(drawn, expected)
    inside = {x: surrounded(drawn.case.tensors[x]) for x in drawn.case.present()}
    within = drawn._replace(case=drawn.case.changed(**inside))
    pool = torch.full((5, *expected.shape[1:]), torch.nan, device=truth.DEVICE)
    indices = torch.tensor([3, 1], device=truth.DEVICE)
    pool[indices] = state_of(drawn, torch.float32)
    assert torch.equal(step(within, pool, state_indices=indices), o)
    assert torch.equal(pool[indices], expected)
    assert pool[[0, 2, 4]].isnan().all()


def test_a_step_on_another_stream(kind: Kind) -> None:
    drawn = draw(kind.case(tokens=2))
    expected, state = state_of(drawn, torch.float32), state_of(drawn, torch.float32)
    o = step(drawn, expected)
    values = state.clone()
    state.fill_(torch.nan)
    with late():
        state.copy_(values)
        found = step(drawn, state)
    assert torch.equal(found, o)
    assert torch.equal(state, expected)


def test_a_step_on_a_gpu_that_is_not_the_current_one(kind: Kind) -> None:
    second, drawn = truth.second_gpu(), draw(kind.case(tokens=2))
    expected = state_of(drawn, torch.float32)
    there = drawn._replace(case=truth.placed(drawn.case, second))
    state = state_of(there, torch.float32)
    o = step(drawn, expected)
    assert torch.equal(step(there, state).to(truth.DEVICE), o)
    assert torch.equal(state.to(truth.DEVICE), expected)


def test_a_step_waits_for_nothing_and_replays(kind: Kind) -> None:
    drawn, other = draw(kind.case(tokens=1)), draw(kind.case(tokens=1))
    indices = torch.tensor([1, -1], device=truth.DEVICE)
    state = state_of(drawn, torch.float32)
    graph, o = captured(lambda: step(drawn, state, state_indices=indices))
    for given, new in zip(held(drawn), held(other), strict=True):
        given.copy_(new)
    # The slots may change from replay to replay, too.
    indices.copy_(torch.tensor([-1, 0]))
    expected = state_of(other, torch.float32)
    state.copy_(expected)
    graph.replay()
    with waits_for_nothing():
        again = step(other, expected, state_indices=indices)
    assert torch.equal(o, again)
    assert (o[0] == 0).all()
    assert torch.equal(state, expected)


def test_steps_in_a_graph_take_each_other_s_states(kind: Kind) -> None:
    # A step starts before the one before it ends, and reads the state that this leaves.
    drawn = draw(kind.case(tokens=1))
    state, expected = state_of(drawn, torch.float32), state_of(drawn, torch.float32)

    def steps(state: torch.Tensor) -> torch.Tensor:
        return torch.stack([step(drawn, state) for _ in range(20)])

    graph, o = captured(lambda: steps(state))
    state.copy_(expected)
    graph.replay()
    outputs = []
    for _ in range(20):
        outputs.append(step(drawn, expected))
        torch.cuda.synchronize()
    assert torch.equal(o, torch.stack(outputs))
    assert torch.equal(state, expected)


def test_opcheck_of_the_step(kind: Kind) -> None:
    drawn = draw(kind.case(tokens=2))
    state, indices = state_of(drawn, torch.float32), torch.tensor([1, -1], device=truth.DEVICE)
    opcheck_all(lambda: step(drawn, state, state_indices=indices), CONTRACTS)


LOGITS = [(decay, dtype, n_steps) for decay in ("head", "channel")
          for dtype, n_steps in ((torch.bfloat16, 2), (torch.float32, 1))]  # fmt: skip
every_logits = pytest.mark.parametrize(("decay", "dtype", "n_steps"), LOGITS)


@every_logits
def test_a_step_with_logits_waits_for_nothing_and_replays(decay, dtype, n_steps) -> None:
    drawn = make_logits(decay, n_steps, dtype, tokens=1, key_size=64, batch=3).to("cuda")
    indices = torch.tensor([4, -1, 0], device=truth.DEVICE)
    pool = torch.randn(5, *drawn.state().shape[1:], device=truth.DEVICE)
    before, expected = pool.clone(), pool.clone()
    graph, o = captured(lambda: drawn.step(pool, state_indices=indices, impl=truth.IMPL))
    for x in (drawn.beta.logits, *drawn.decay[:3]):
        x.mul_(-0.5)
    pool.copy_(before)
    graph.replay()
    with waits_for_nothing():
        again = drawn.step(expected, state_indices=indices, impl=truth.IMPL)
    assert torch.equal(o, again)
    assert torch.equal(pool, expected)
    assert (o[1] == 0).all()
    assert torch.equal(pool[1:4], before[1:4])


def test_nan_around_logits_is_never_read() -> None:
    drawn = make_logits("channel", 2, torch.bfloat16, key_size=40, value_size=20).to("cuda")
    inside = drawn._replace(
        beta=BetaLogits(surrounded(drawn.beta.logits), drawn.beta.beta_max),
        decay=type(drawn.decay)(*map(surrounded, drawn.decay[:3])),
    )
    state, expected = drawn.state(), drawn.state()
    assert torch.equal(inside.step(state, impl=truth.IMPL), drawn.step(expected, impl=truth.IMPL))
    assert torch.equal(state, expected)
