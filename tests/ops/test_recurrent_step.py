"""Steps with a state in place equal the operators."""

from itertools import pairwise

import pytest
import torch

from deltarule import recurrent_step
from oracle import Case, make_case
from tolerance import assert_close, relative_rms

every_impl = pytest.mark.parametrize("impl", ["torch", "reference"])
KINDS = [("none", "tied", 1), ("constant", "none", 1), ("head", "tied", 2), ("channel", "tied", 1),
         ("channel", "free", 1), ("none", "free", 1)]  # fmt: skip


def step(case: Case, first: int, last: int, impl: str, **options) -> torch.Tensor:
    x, n = case.tensors, case.n_steps
    token, rows = slice(first, last), slice(first * n, last * n)
    log_decay = x["log_decay"]
    if log_decay is not None and log_decay.ndim > 1:
        log_decay = log_decay[:, token]
    a, b = (None if x[name] is None else x[name][:, token] for name in "ab")
    beta = None if x["beta"] is None else x["beta"][:, rows]
    return recurrent_step(
        x["q"][:, token], x["k"][:, rows], x["v"][:, rows], beta=beta, log_decay=log_decay,
        a=a, b=b, n_steps=n, normalize_qk=case.normalize_qk, impl=impl, **options,
    )  # fmt: skip


@every_impl
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_the_operator(impl: str, kind: tuple[str, str, int]) -> None:
    decay, erase, n_steps = kind
    case = make_case(decay, erase, tokens=20, n_steps=n_steps, normalize_qk=erase != "free")
    expected = case.run("reference")
    state = case.tensors["initial_state"].clone()
    bounds = [0, 1, 2, 5, 20]
    parts = [step(case, first, last, impl, state=state) for first, last in pairwise(bounds)]
    assert_close(torch.cat(parts, 1), expected.o)
    assert_close(state, expected.final_state)


@every_impl
def test_only_indexed_slots_of_a_pool_are_touched(impl: str) -> None:
    case = make_case("head", "tied", batch=4, tokens=1)
    pool = torch.randn(7, 4, 6, 8, dtype=torch.float64)
    before = pool.clone()
    indices = torch.tensor([5, -1, 0, -1])
    o = step(case, 0, 1, impl, state=pool, state_indices=indices)
    for row, slot in enumerate(indices.tolist()):
        if slot == -1:
            assert (o[row] == 0).all()
            continue
        alone = before[slot : slot + 1].clone()
        one = case.changed(**{name: case.tensors[name][row : row + 1] for name in case.present()})
        assert_close(o[row : row + 1], step(one, 0, 1, impl, state=alone))
        assert_close(pool[slot : slot + 1], alone)
    untouched = [1, 2, 3, 4, 6]
    assert torch.equal(pool[untouched], before[untouched])


@every_impl
def test_another_null_index(impl: str) -> None:
    case = make_case("none", "tied", batch=2, tokens=1)
    pool = torch.randn(3, 4, 6, 8, dtype=torch.float64)
    before = pool.clone()
    step(case, 0, 1, impl, state=pool, state_indices=torch.tensor([0, 2]), null_index=0)
    assert torch.equal(pool[:2], before[:2])
    assert not torch.equal(pool[2], before[2])


@every_impl
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("slots", "nulls"), [(0, 0), (0, 2), (3, 2)])
def test_no_row_or_null_rows_alone_give_zeros(impl: str, kind, slots: int, nulls: int) -> None:
    decay, erase, n_steps = kind
    case = make_case(decay, erase, batch=2, tokens=3, n_steps=n_steps, normalize_qk=erase != "free")
    case = case.changed(**{
        name: x[:nulls] if x.ndim > 1 else x
        for name, x in case.tensors.items() if name in case.present()
    })  # fmt: skip
    pool = torch.randn(slots, *case.tensors["initial_state"].shape[1:], dtype=torch.float64)
    before, states = pool.clone(), pool.new_zeros(nulls, 3, *pool.shape[1:])
    indices = torch.full((nulls,), -1)
    for options in ({}, {"states": states}):
        o = step(case, 0, 3, impl, state=pool, state_indices=indices, **options)
        assert o.shape[:2] == (nulls, 3)
        assert (o == 0).all()
    assert torch.equal(pool, before)


@every_impl
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_state_rounds_once_a_call(impl: str, dtype) -> None:
    case = make_case("head", "tied", tokens=1, dtype=torch.float32)
    state = case.tensors["initial_state"].to(dtype)
    exact = case.changed(initial_state=state.float()).run("reference")
    o = step(case, 0, 1, impl, state=state)
    assert relative_rms(o, exact.o.double()) <= 1e-6
    assert torch.equal(state, exact.final_state.to(dtype))


@every_impl
def test_a_pool_may_be_a_view(impl: str) -> None:
    case = make_case("head", "tied", tokens=1)
    storage = torch.zeros(2, 3, 4, 6, 8, dtype=torch.float64)
    view = storage[:, 1]
    view.copy_(case.tensors["initial_state"])
    step(case, 0, 1, impl, state=view)
    assert_close(storage[:, 1], case.run("reference").final_state)
    assert (storage[:, ::2] == 0).all()


def test_the_triton_kernel_wants_a_gpu() -> None:
    case = make_case("head", "tied", tokens=1)
    with pytest.raises(ValueError, match="Triton needs a CUDA device, and state is on cpu"):
        step(case, 0, 1, "triton", state=case.tensors["initial_state"])


@every_impl
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_drafted_tokens_are_taken_back(impl, kind, indexed) -> None:
    decay, erase, n_steps = kind
    case = make_case(decay, erase, batch=3, tokens=6, n_steps=n_steps, normalize_qk=erase != "free")
    before = case.tensors["initial_state"]
    options = {"state_indices": torch.tensor([2, -1, 0])} if indexed else {}
    state, states = before.clone(), torch.zeros(3, 6, *before.shape[1:], dtype=before.dtype)
    o = step(case, 0, 6, impl, state=state, states=states, **options)
    plain = before.clone()
    assert torch.equal(o, step(case, 0, 6, impl, state=plain, **options))
    assert torch.equal(state, plain)
    for accepted in range(1, 7):
        again = before.clone()
        step(case, 0, accepted, impl, state=again, **options)
        rows = torch.tensor([2, 0]) if indexed else torch.arange(3)
        kept = states[torch.tensor([0, 2])] if indexed else states
        assert torch.equal(kept[:, accepted - 1], again[rows])
    assert not indexed or (states[1] == 0).all()


def test_room_for_states_is_checked() -> None:
    case = make_case("head", "tied", batch=2, tokens=3)
    state = case.tensors["initial_state"].clone()
    with pytest.raises(ValueError, match=r"states must be \[B, T, HV, V, K\] = \[2, 3, "):
        step(case, 0, 3, "torch", state=state, states=torch.zeros(2, 2, *state.shape[1:]))
    with pytest.raises(ValueError, match=r"states must be contiguous, torch\.float64"):
        step(case, 0, 3, "torch", state=state, states=torch.zeros(2, 3, *state.shape[1:]))
