"""Prompts of many requests at once, their states read from a pool and written back into it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.checks import check_axes, readable
from deltarule.ops.chunks import CHUNK_ROWS
from deltarule.ops.delta_rule.implementations import (
    IMPLEMENTATIONS,
    Request,
    backend_of,
    run_reference,
)
from deltarule.ops.delta_rule.inputs import Inputs, check_arguments
from deltarule.ops.delta_rule.step import STATE_DTYPES
from deltarule.ops.delta_rule.torch import passes
from deltarule.ops.dispatch import Impl, choose, first_that_runs
from deltarule.ops.few_tokens import check_no_gradient
from deltarule.ops.history import offsets_of
from deltarule.ops.pools import check_pool, check_room, check_slots
from deltarule.ops.serving import definition
from deltarule.ops.serving.pool import read, write
from deltarule.shapes import Beta, Decay, Erase, Keys, Offsets, Outputs, Queries, State, Values


class PrefillOutput(NamedTuple):
    """The result of `pool_prefill`.

    o: Outputs [B, T, HV, V].
    border_states: [M, HV, V, K], the state before each border, or None.
    """

    o: Outputs
    border_states: Tensor | None


class Prefill(NamedTuple):
    """One call."""

    inputs: Inputs
    state: Tensor
    reads: Tensor
    writes: Tensor
    null_index: int
    borders: Tensor | None

    @property
    def offsets(self) -> Tensor:
        """[N + 1], of the rows of a batch too."""
        return offsets_of(self.inputs.cu_seqlens, self.inputs.q)


def pool_prefill(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    beta: Beta | None,
    log_decay: Decay | None = None,
    a: Erase | None = None,
    b: Erase | None = None,
    n_steps: int = 1,
    scale: float | None = None,
    normalize_qk: bool = False,
    state: State,
    state_indices: Tensor,
    write_indices: Tensor | None = None,
    null_index: int = -1,
    cu_seqlens: Offsets | None = None,
    borders: Tensor | None = None,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    impl: Impl = "auto",
) -> PrefillOutput:
    r"""Run `delta_rule` or `dplr` on sequences whose states lie in slots of a pool.

    .. math::
        S \leftarrow S A_t + w_t k_t^\top \qquad o_t = \mathrm{scale} \cdot S q_t

    An index at or below `null_index` reads zeros and writes nothing. There is no gradient.

    Args:
        q: Queries [B, T, H, K] in float64, float32, bfloat16 or float16.
        k: Keys `[B, T*n, H, K]` in q's dtype.
        v: Values `[B, T*n, HV, V]` in q's dtype; HV is a multiple of H.
        beta: Write strength `[B, T*n, HV]` in [0, 2]. None, written out, means no tied erase.
        log_decay: Natural log of the decay, <= 0, float32: [HV], [B, T, HV] or [B, T, HV, K]. None
            means no decay.
        a: Erase query [B, T, HV, K], together with `b` and without `beta`. None means none.
        b: Erase key [B, T, HV, K].
        n_steps: Writes for each token; 1 with `a` and `b`.
        scale: Factor of the read-out. None means K ** -0.5.
        normalize_qk: Divide q and k by their norm first; False with `a` and `b`.
        state: Pool [slots, HV, V, K], any strides; float32, bfloat16 or float16 (float64 with
            float64 q). Only slots in `write_indices` are overwritten.
        state_indices: Slot that each sequence starts from [N], int32 or int64; null for one that
            starts anew.
        write_indices: Slot that each final state goes to [N], none twice (checked on the CPU).
            None means state_indices.
        null_index: The last index that names no slot: -1, or 0 where slot 0 is kept free.
        cu_seqlens: Offsets [N + 1] of sequences packed into one row. None: a row is a sequence.
        borders: [M] tokens, counted along all rows, before which to return the state: each at a
            multiple of 64 tokens of its sequence. None returns none. n_steps then divides 64.
        out: Where the outputs go, contiguous [B, T, HV, V] in v's dtype. None: a new tensor.
        batch_invariant: Fix the plan of execution independently of B and N.
        impl: "auto", or a named implementation of `delta_rule`.

    Returns:
        `PrefillOutput`: o [B, T, HV, V], and border_states [M, HV, V, K] or None, in the dtype of
        the computation, from Triton kernels in q's.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device, or needs a gradient.

    Examples:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 70, 2, 4).unbind()
        >>> pool, slots = torch.zeros(5, 2, 4, 4), torch.tensor([3, 1])
        >>> cu_seqlens, borders = torch.tensor([0, 66, 70]), torch.tensor([0, 64])
        >>> out = pool_prefill(q, k, v, beta=torch.rand(1, 70, 2), normalize_qk=True, state=pool,
        ...     state_indices=slots, cu_seqlens=cu_seqlens, borders=borders)
        >>> out.o.shape, out.border_states.shape, pool.sum((1, 2, 3)).nonzero().flatten()
        (torch.Size([1, 70, 2, 4]), torch.Size([2, 2, 4, 4]), tensor([1, 3]))

    Source: the recurrences of `delta_rule` and `dplr`.
    """
    streams, flags = (q, k, v, beta, a, b, log_decay), (normalize_qk, batch_invariant)
    inputs = Inputs(*streams, None, cu_seqlens, n_steps, 1.0, *flags)
    inputs = check_arguments(inputs, scale)
    writes = state_indices if write_indices is None else write_indices
    call = Prefill(inputs, state, state_indices, writes, null_index, borders)
    check(call, out)
    o, found = run(call, impl)
    return PrefillOutput(o if out is None else out.copy_(o), found)


def check(call: Prefill, out: Tensor | None) -> None:
    inputs, state, reads, writes, null_index, borders = call
    size, rows = inputs.state_shape[1:], inputs.sequences
    check_pool(state, "[slots, HV, V, K]", size, STATE_DTYPES[inputs.dtype], inputs.q)
    check_slots(reads, writes, rows, state, null_index)
    check_room("out", out, "[B, T, HV, V]", inputs.output_shape, inputs.v)
    check_no_gradient("pool_prefill", (*inputs[:7], state, out))
    if borders is None:
        return
    if CHUNK_ROWS % inputs.n_steps:
        raise ValueError(f"borders need n_steps that divides {CHUNK_ROWS}, got {inputs.n_steps}")
    check_axes("borders", borders, "[M]", 1)
    if borders.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"borders must be int32 or int64, got {borders.dtype}")
    if readable(borders):
        _, place = within(call.offsets, borders)
        inside = (borders >= 0) & (borders < call.offsets[-1])
        if not (inside & (place % CHUNK_ROWS == 0)).all():
            raise ValueError(
                f"borders must be tokens at multiples of {CHUNK_ROWS} of their sequences, which "
                f"start at {call.offsets.tolist()[:-1]}, got {borders.tolist()}"
            )


def within(offsets: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence of each token, and its place there; empty sequences have none."""
    tokens = tokens.to(offsets)
    sequence = torch.searchsorted(offsets, tokens, right=True) - 1
    return sequence, tokens - offsets[sequence.clamp(0, len(offsets) - 1)]


def run(call: Prefill, impl: str) -> tuple[Tensor, Tensor | None]:
    """Out of the slots, through the operator, into the slots."""
    if impl == "reference":
        o, before = definition.prefill(lambda inputs: run_reference(Request(inputs)), call)
        nothing = call.state.new_zeros(0, *call.state.shape[1:], dtype=call.inputs.dtype)
        return o, None if call.borders is None else torch.stack(before) if before else nothing
    with torch.no_grad():
        start = read(call.state, call.reads, call.null_index, call.inputs.dtype)
        inputs = call.inputs._replace(initial_state=start)
        chosen = choose(IMPLEMENTATIONS, Request(inputs, False), impl, inputs.q.device)
        found = None
        if call.borders is None:
            o, final = chosen.run(Request(inputs, False))
        else:
            name = first_that_runs(IMPLEMENTATIONS, Request(inputs)) if impl == "auto" else impl
            # The fused kernel keeps no states of chunks; the kernels of stages do.
            backend = "torch" if name == "torch" or not inputs.q.numel() else "triton"
            o, final, saved = backend_of(backend).forward(inputs, True)
            found = border_states(call, saved, backend)
        assert final is not None
        write(call.state, call.writes, call.null_index, final)
        return o, found


def border_states(call: Prefill, saved: Tensor, backend: str) -> Tensor:
    """Picked from the states at the chunks' starts, which a forward keeps for its backward."""
    inputs, offsets = call.inputs, call.offsets
    assert call.borders is not None
    sequence, place = within(offsets, call.borders)
    if backend == "torch":
        size = passes.tokens_in_chunk(inputs)
        counts = -(-offsets.diff() // size)
        return saved[(counts.cumsum(0) - counts)[sequence] + place // size]
    from deltarule.ops.delta_rule.triton import passes as kernels
    from deltarule.ops.delta_rule.triton.plan import Call, make_plan

    kept: Any = Call(inputs, make_plan(inputs))
    kernels.keep(kept, True, saved)
    size = kept.plan.sizes["CT"]
    first = torch.arange(inputs.sequences, device=offsets.device)
    each = -(-inputs.q.shape[1] // size)
    first = first * each if inputs.cu_seqlens is None else first + offsets[:-1] // size
    return kept["states"][first[sequence] + place // size]
