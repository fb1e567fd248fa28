"""States in a pool: what the functions of a server do, beside loops over one request at a time."""

from itertools import pairwise

import pytest
import torch
from torch.library import opcheck

from deltarule import BetaLogits, DecayLogits, pack
from deltarule.ops.delta_rule.implementations import IMPLEMENTATIONS
from deltarule.ops.dispatch import always
from deltarule.ops.serving import pool as moves
from deltarule.ops.serving import step
from deltarule.ops.serving.pool import read_op, write_op
from deltarule.serve import pool_convolution, pool_prefill, pool_step
from kernels.interpreted import interpreted
from opchecked import opcheck_all
from ops.places import ON_CPU, Place
from oracle import Case, make_case
from promised import promised
from tolerance import assert_close
from truth import TIMED, part

promised("triton")

from deltarule.ops.serving import pool_triton

KINDS = [("head", "tied", 1), ("channel", "tied", 2), ("channel", "free", 1), ("none", "none", 1)]


@pytest.fixture(params=ON_CPU)
def place(request, monkeypatch) -> Place:
    if request.param.is_interpreted:
        for table in (IMPLEMENTATIONS, step.STEPS):
            monkeypatch.setitem(table, "triton", table["triton"]._replace(why_not=always))
        monkeypatch.setattr(moves, "why_not_fused", lambda pool: None)
    return request.param


def kind_case(kind, lengths, dtype=torch.float64) -> Case:
    decay, erase, n_steps = kind
    sizes = {"n_steps": n_steps, "lengths": lengths, "dtype": dtype}
    return make_case(decay, erase, normalize_qk=erase != "free", **sizes)


def arguments(case: Case) -> dict:
    own = {name: case.tensors[name] for name in TIMED}
    return own | {"n_steps": case.n_steps, "normalize_qk": case.normalize_qk}


def alone(case: Case, first: int, last: int, state: torch.Tensor):
    """The definition on some tokens of the packed row from a state [HV, V, K]."""
    own = part(case, case.tensors, slice(first, last)) | {"initial_state": state[None].double()}
    out = Case(own, case.n_steps, case.normalize_qk).to(torch.float64).run("reference")
    return out.o[0], out.final_state[0]


def pool_of(case: Case, slots: int, dtype=torch.float64) -> torch.Tensor:
    """A pool with gaps between its slots."""
    size = case.tensors["initial_state"].shape[1:]
    return torch.randn(slots, 2, *size, dtype=torch.float64).to(dtype)[:, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_begin_and_end_in_their_slots(place, kind) -> None:
    lengths = (70, 0, 1, 130, 64)
    case, cu = kind_case(kind, lengths, place.dtype), [0, 70, 70, 71, 201, 265]
    pool = pool_of(case, 9, place.dtype)
    before = pool.clone()
    reads, writes = torch.tensor([5, 0, -1, -7, 2]), torch.tensor([5, 0, 3, 8, -1])
    borders, out = torch.tensor([135, 0, 64, 71, 199]), torch.zeros(1, 265, 4, 6, dtype=place.dtype)
    found = pool_prefill(
        **arguments(case), state=pool, state_indices=reads.int(), write_indices=writes,
        cu_seqlens=pack(lengths), borders=borders, out=out, impl=place.impl,
    )  # fmt: skip
    assert found.o is out
    zeros = torch.zeros_like(before[0])
    for (first, last), slot, kept in zip(
        pairwise(cu), reads.tolist(), writes.tolist(), strict=True
    ):
        start = before[slot] if slot >= 0 else zeros
        o, final = alone(case, first, last, start)
        assert_close(out[0, first:last], o, dtype=place.dtype)
        if kept >= 0:
            assert_close(pool[kept], final, dtype=place.dtype)
    assert torch.equal(pool[[1, 2, 4, 6, 7]], before[[1, 2, 4, 6, 7]])
    wanted = [
        alone(case, 71, 135, zeros)[1], before[5].double(), alone(case, 0, 64, before[5])[1],
        zeros.double(), alone(case, 71, 199, zeros)[1],
    ]  # fmt: skip
    assert_close(found.border_states, torch.stack(wanted), dtype=place.dtype)


def test_rows_of_a_batch_and_a_reserved_first_slot(place) -> None:
    case = make_case("head", "tied", batch=3, tokens=66, dtype=place.dtype)
    pool = pool_of(case, 4, place.dtype)
    before = pool.clone()
    found = pool_prefill(
        **arguments(case), state=pool, state_indices=torch.tensor([2, 0, 1]), null_index=0,
        borders=torch.tensor([64, 66]), impl=place.impl,
    )  # fmt: skip
    starts = torch.stack([before[2], torch.zeros_like(before[0]), before[1]])
    exact = case.changed(initial_state=starts).to(torch.float64).run("reference")
    assert_close(found.o, exact.o, dtype=place.dtype)
    assert_close(pool[[2, 1]], exact.final_state[[0, 2]], dtype=place.dtype)
    assert torch.equal(pool[[0, 3]], before[[0, 3]])
    assert torch.equal(found.border_states[1], starts[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_pool_rounds_what_it_keeps(dtype) -> None:
    case = make_case("head", "tied", lengths=(5, 3), dtype=torch.float32)
    pool, slots = pool_of(case, 3, dtype), torch.tensor([2, 0])
    exact = case.changed(initial_state=pool[slots].float()).run("torch")
    pool_prefill(**arguments(case), state=pool, state_indices=slots, cu_seqlens=pack((5, 3)))
    assert torch.equal(pool[slots], exact.final_state.to(dtype))


ROWS = (3, 0, 1, 2, 3)
OFFSETS = [0, 3, 3, 4, 6, 9]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_lengths_step_in_their_slots(place, kind) -> None:
    case = kind_case(kind, ROWS, place.dtype)
    pool, slots = pool_of(case, 6, place.dtype), [4, 5, -3, 0, 2]
    before, out = pool.clone(), torch.empty(1, 9, 4, 6, dtype=place.dtype)
    o = pool_step(
        **arguments(case), state=pool, state_indices=torch.tensor(slots, dtype=torch.int32),
        cu_seqlens=pack(ROWS), out=out, impl=place.impl,
    )  # fmt: skip
    assert o is out
    for (first, last), slot in zip(pairwise(OFFSETS), slots, strict=True):
        if slot < 0:
            assert (o[0, first:last] == 0).all()
        elif first < last:
            expected, final = alone(case, first, last, before[slot])
            assert_close(o[0, first:last], expected, dtype=place.dtype)
            assert_close(pool[slot], final, dtype=place.dtype)
    assert torch.equal(pool[[1, 3, 5]], before[[1, 3, 5]])


DRAFTED = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 0, 11], [12, 13, 14]]
ACCEPTED = [3, 1, 2, 1, 2]


def check_drafts(case: Case, before, pool, o) -> None:
    written = set()
    for (first, last), slots, m in zip(pairwise(OFFSETS), DRAFTED, ACCEPTED, strict=True):
        for t in range(first, last):
            outputs, after = alone(case, first, t + 1, before[slots[m - 1]])
            assert_close(o[0, t], outputs[-1], dtype=case.tensors["q"].dtype)
            if slots[t - first] > 0:
                written.add(slots[t - first])
                assert_close(pool[slots[t - first]], after, dtype=case.tensors["q"].dtype)
    others = [slot for slot in range(len(pool)) if slot not in written]
    assert 0 in others
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize("kind", KINDS)
def test_each_drafted_token_has_its_slot(place, kind) -> None:
    case = kind_case(kind, ROWS, place.dtype)
    pool = pool_of(case, 15, place.dtype)
    before = pool.clone()
    o = pool_step(
        **arguments(case), state=pool, state_indices=torch.tensor(DRAFTED), null_index=0,
        accepted=torch.tensor(ACCEPTED), cu_seqlens=pack(ROWS), impl=place.impl,
    )  # fmt: skip
    check_drafts(case, before, pool, o)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gates_of_ragged_rows_come_as_logits(place, lower_bound) -> None:
    case = make_case("channel", "tied", lengths=ROWS, dtype=place.dtype)
    logits, A_log, dt_bias = torch.randn(1, 9, 4, 8), torch.rand(4), torch.randn(4, 8)
    logits, A_log, dt_bias = (x.to(place.dtype) for x in (logits, A_log, dt_bias))
    decay = DecayLogits(logits, A_log, dt_bias, lower_bound)
    rate, x = A_log.exp()[:, None], logits + dt_bias
    log_decay = -rate * x.exp().log1p() if lower_bound is None else -5 / (1 + (-rate * x).exp())
    strength = torch.randn(1, 9, 4, dtype=place.dtype)
    made = case.changed(beta=strength.sigmoid(), log_decay=log_decay)
    pool = pool_of(case, 15, place.dtype)
    before = pool.clone()
    given = arguments(case) | {"beta": BetaLogits(strength), "log_decay": decay}
    rows = {"accepted": torch.tensor(ACCEPTED), "cu_seqlens": pack(ROWS), "null_index": 0}
    o = pool_step(**given, state=pool, state_indices=torch.tensor(DRAFTED), impl=place.impl, **rows)
    check_drafts(made, before, pool, o)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_rows_move_out_of_their_slots_and_back(dtype, channels_last) -> None:
    pool = torch.randn(5, 2, 30, 40).to(dtype)[:, 1]
    pool = pool.mT if channels_last else pool
    before, slots = pool.clone(), torch.tensor([3, -2, 0], dtype=torch.int32)
    rows = torch.empty(3, *pool.shape[1:])
    pool_triton.move(pool, rows, slots, -1, write=False)
    assert torch.equal(rows[[0, 2]], before[[3, 0]].float())
    assert (rows[1] == 0).all()
    # Exact in every type, because the interpreter cuts where a GPU rounds.
    pool_triton.move(pool, 2 * rows, slots, -1, write=True)
    assert torch.equal(pool[[3, 0]], 2 * before[[3, 0]])
    assert torch.equal(pool[[1, 2, 4]], before[[1, 2, 4]])


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_of_the_step(kind) -> None:
    case = kind_case(kind, ROWS)
    pool, rows = pool_of(case, 15).contiguous(), {"cu_seqlens": pack(ROWS), "null_index": 0}
    drafts = {"state_indices": torch.tensor(DRAFTED), "accepted": torch.tensor(ACCEPTED)}
    opcheck_all(lambda: pool_step(**arguments(case), state=pool, **drafts, **rows))


def test_opcheck_of_reading_and_writing() -> None:
    pool, slots = torch.randn(5, 2, 3), torch.tensor([3, -1])
    opcheck(read_op, (pool, slots, -1, torch.float16))
    opcheck(write_op, (pool, slots, -1, torch.randn(2, 2, 3)))


def test_compiled_calls_write_their_pools() -> None:
    case, taps = make_case("head", "tied", lengths=ROWS), torch.randn(6, 4)
    pools, inputs = torch.randn(15, 4, 6, 8).double().repeat(2, 1, 1, 1, 1), torch.zeros(2, 9, 3, 6)
    slots, x = torch.tensor([4, 5, -1, 0, 2]), torch.randn(1, 9, 6)
    drafts = {"state_indices": torch.tensor(DRAFTED), "accepted": torch.tensor(ACCEPTED)}

    def run(place: int) -> tuple[torch.Tensor, ...]:
        given, cu_seqlens = arguments(case) | {"state": pools[place]}, pack(ROWS)
        rows = {"state_indices": slots, "cu_seqlens": cu_seqlens}
        y = pool_convolution(x, taps, state=inputs[place], **rows)
        o = pool_prefill(**given, **rows).o
        return o, y, pool_step(**given, **drafts, cu_seqlens=cu_seqlens, null_index=0)

    expected = run(0)
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(1)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(*pools)
    assert torch.equal(*inputs)


def test_nothing_to_do(place) -> None:
    q, pool = torch.zeros(1, 0, 2, 4), torch.randn(3, 2, 4, 4)
    empty = {**dict.fromkeys("qkv", q), "beta": q[..., 0], "state_indices": torch.tensor([2, 1])}
    empty |= {"cu_seqlens": torch.zeros(3, dtype=torch.int64)}
    before = pool.clone()
    for function in (pool_prefill, pool_step):
        function(**empty | {"state": pool}, impl=place.impl)
        assert torch.equal(pool, before)
