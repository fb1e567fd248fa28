"""Kernels on pools of states, without a GPU: values under the interpreter."""

import pytest
import torch

from deltarule import BetaLogits, DecayLogits, pack
from deltarule.ops.delta_rule.gate_logits import with_logits
from deltarule.ops.delta_rule.implementations import backend_of
from deltarule.ops.serving import prefill, step
from deltarule.serve import pool_prefill, pool_step
from kernels.interpreted import inputs_of, interpreted
from oracle import Case, make_case
from promised import promised
from tolerance import assert_close

promised("triton")

from deltarule.ops.serving import pool_triton

pytestmark = interpreted
PARTS = ("q", "k", "v", "beta", "a", "b", "log_decay")
KINDS = [("head", "tied", 1), ("channel", "tied", 2), ("channel", "free", 1), ("none", "none", 1)]


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


ROWS = (3, 0, 1, 2)
SLOTS = torch.tensor([[1, 2, 3], [4, 5, 6], [-3, 8, 9], [10, 0, 11]], dtype=torch.int32)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_ragged_rows_equals_the_definition(kind, drafted, logits) -> None:
    decay, erase, n_steps = kind
    case = make_case(
        decay, erase, n_steps=n_steps, lengths=ROWS, normalize_qk=erase != "free",
        dtype=torch.float32,
    )  # fmt: skip
    given = {name: case.tensors[name] for name in PARTS} | {
        "n_steps": n_steps, "normalize_qk": case.normalize_qk, "cu_seqlens": pack(ROWS),
        "null_index": 0, "state_indices": SLOTS if drafted else SLOTS[:, 0],
        "accepted": torch.tensor([3, 1, 2, 1]) if drafted else None,
    }  # fmt: skip
    maps = step.GateMaps()
    inputs = inputs_of(case, state=False)
    if logits and decay != "none" and erase != "free":
        sizes = case.tensors["log_decay"].shape[2:]
        bound = -5.0 if decay == "channel" else None
        rates = torch.rand(4), torch.randn(sizes)
        gates = case.tensors["beta"], case.tensors["log_decay"]
        pair = BetaLogits(gates[0], 2.0), DecayLogits(gates[1], *rates, bound)
        given |= dict(zip(("beta", "log_decay"), pair, strict=True))
        inputs, maps = with_logits(inputs, *pair)
    pool = torch.randn(12, 2, 4, 6, 8)[:, 1]
    expected = pool.clone()
    o = pool_step(**given, state=expected, impl="reference")
    out = torch.empty_like(o)
    step.run_triton(step.PoolStep(
        inputs, maps, pool, given["state_indices"], given["accepted"], 0, out
    ))  # fmt: skip
    assert_close(out, o)
    assert_close(pool, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_states_at_borders_come_from_what_a_forward_keeps(kind) -> None:
    decay, erase, n_steps = kind
    lengths = (70, 0, 1, 130)
    case = make_case(
        decay, erase, n_steps=n_steps, lengths=lengths, normalize_qk=erase != "free",
        dtype=torch.float32,
    )  # fmt: skip
    check_borders(case, torch.tensor([135, 0, 64, 71, 199]))


def test_states_at_borders_of_the_rows_of_a_batch() -> None:
    check_borders(make_case("head", "tied", tokens=100, dtype=torch.float32),
                  torch.tensor([64, 100, 164]))  # fmt: skip


def check_borders(case: Case, borders: torch.Tensor) -> None:
    starts, slots = case.tensors["initial_state"], torch.arange(len(case.tensors["initial_state"]))
    given = {name: case.tensors[name] for name in PARTS} | {
        "n_steps": case.n_steps, "normalize_qk": case.normalize_qk,
        "cu_seqlens": None if case.lengths is None else pack(case.lengths),
    }  # fmt: skip
    expected = pool_prefill(
        **given, state=starts.clone(), state_indices=slots, borders=borders, impl="reference"
    )
    inputs = inputs_of(case, state=False)
    o, _, saved = backend_of("triton").forward(inputs._replace(initial_state=starts), True)
    call = prefill.Prefill(inputs._replace(initial_state=starts), starts, slots, slots, -1, borders)
    assert_close(o, expected.o)
    assert_close(prefill.border_states(call, saved, "triton"), expected.border_states)
