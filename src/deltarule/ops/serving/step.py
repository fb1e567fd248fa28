"""A few tokens for each of many requests: rows of any lengths, drafted tokens with their slots."""

import torch
from torch import Tensor

from deltarule.ops.checks import check_dense, readable, shape
from deltarule.ops.delta_rule import definition
from deltarule.ops.delta_rule.gate_logits import NO_MAPS, BetaLogits, DecayLogits, Step, checked
from deltarule.ops.delta_rule.implementations import Request, run_reference
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.step import STATE_DTYPES, triton_step, why_not_triton
from deltarule.ops.delta_rule.torch.step import recurrent_step as torch_step
from deltarule.ops.dispatch import Table, choose
from deltarule.ops.few_tokens import check_no_gradient
from deltarule.ops.history import offsets_of
from deltarule.ops.in_place import InPlace
from deltarule.ops.plain import PlainImpl, forms
from deltarule.ops.pools import check_indices, check_pool, check_room
from deltarule.ops.serving.pool import read, write
from deltarule.shapes import Beta, Decay, Erase, Keys, Offsets, Outputs, Queries, State, Values


def pool_step(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    beta: Beta | BetaLogits | None,
    log_decay: Decay | DecayLogits | None = None,
    a: Erase | None = None,
    b: Erase | None = None,
    n_steps: int = 1,
    scale: float | None = None,
    normalize_qk: bool = False,
    state: State,
    state_indices: Tensor,
    accepted: Tensor | None = None,
    null_index: int = -1,
    cu_seqlens: Offsets | None = None,
    out: Tensor | None = None,
    impl: PlainImpl = "auto",
) -> Outputs:
    r"""Advance the states of a pool by a few tokens of each row, drafted ones or not.

    .. math::
        S \leftarrow S A_t + w_t k_t^\top \qquad o_t = \mathrm{scale} \cdot S q_t

    With a slot for each row, the state after its last token goes back there. With a slot for each
    token, the state after token t goes to slot t, and the next call starts from the slot of the
    last token that was accepted: no state is copied and none is computed again. There is no
    gradient.

    Args:
        q: Queries [B, T, H, K] in float64, float32, bfloat16 or float16.
        k: Keys `[B, T*n, H, K]` in q's dtype.
        v: Values `[B, T*n, HV, V]` in q's dtype; HV is a multiple of H.
        beta: Write strength `[B, T*n, HV]` in [0, 2], or `BetaLogits`. None, written out, means no
            tied erase.
        log_decay: Natural log of the decay, <= 0, float32: [HV], [B, T, HV] or [B, T, HV, K]; or
            `DecayLogits`. None means no decay.
        a: Erase query [B, T, HV, K], together with `b` and without `beta`. None means none.
        b: Erase key [B, T, HV, K].
        n_steps: Writes for each token; 1 with `a` and `b`.
        scale: Factor of the read-out. None means K ** -0.5.
        normalize_qk: Divide q and k by their norm first; False with `a` and `b`.
        state: Pool [slots, HV, V, K]; float32, bfloat16 or float16 (float64 with float64 q). Only
            slots in `state_indices` are overwritten.
        state_indices: Slot of each row [N], or of each of its tokens [N, S] with S at least the
            tokens of the longest row; int32 or int64, none twice (checked on the CPU). A row that
            starts from a null slot writes nothing and gives zeros; the state after a token with
            one goes nowhere.
        accepted: [N] from 1 to S: the row starts from slot accepted - 1 of its S. None means 1.
        null_index: The last index that names no slot: -1, or 0 where slot 0 is kept free.
        cu_seqlens: Offsets [N + 1] of rows of any lengths, packed into one. None: rows of a batch.
        out: Where the outputs go, contiguous [B, T, HV, V] in v's dtype. None: a new tensor.
        impl: "auto", or a named implementation, which runs or raises with the reason.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device, or needs a gradient.

    Examples:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 4, 2, 4).unbind()
        >>> pool, beta = torch.zeros(9, 2, 4, 4), torch.rand(1, 4, 2)
        >>> slots = torch.tensor([[1, 2, 3], [4, 5, 6]])
        >>> rows = {"cu_seqlens": torch.tensor([0, 3, 4]), "state_indices": slots}
        >>> pool_step(q, k, v, beta=beta, state=pool, **rows).shape
        torch.Size([1, 4, 2, 4])
        >>> o = pool_step(q, k, v, beta=beta, state=pool, accepted=torch.tensor([2, 1]), **rows)

    Source: the recurrences of `delta_rule` and `dplr`, one token at a time.
    """
    inputs = Inputs(q, k, v, None, a, b, None, None, cu_seqlens, n_steps, normalize_qk=normalize_qk)
    inputs, maps = checked(inputs, scale, beta, log_decay)
    check_room("out", out, "[B, T, HV, V]", inputs.output_shape, inputs.v)
    room = torch.empty(inputs.output_shape, dtype=v.dtype, device=v.device) if out is None else out
    step = Step(inputs, maps, state, state_indices, null_index, None, accepted, room)
    check_no_gradient("pool_step", (*step.inputs[:7], *maps[:2], state, out))
    check(step, state_indices)
    choose(STEPS, step, impl, state.device).run(step)
    return room


def check(step: Step, slots: Tensor) -> None:
    inputs, state, accepted = step.inputs, step.state, step.accepted
    rows, dtypes = inputs.sequences, STATE_DTYPES[inputs.dtype]
    check_pool(state, "[slots, HV, V, K]", inputs.state_shape[1:], dtypes, inputs.q)
    check_indices("state_indices", slots, "[N] or [N, S]", rows, state, step.null_index)
    most = slots.shape[1] if slots.ndim == 2 else None
    if accepted is not None:
        check_dense("accepted", accepted, " [N]")
        if most is None or accepted.shape != (rows,):
            said = f"accepted must be [N] = [{rows}] beside state_indices [N, S]"
            raise ValueError(f"{said}, got {shape(accepted, slots)}")
    if most is None or not readable(state):
        return
    longest = max(offsets_of(inputs.cu_seqlens, inputs.q).diff().tolist(), default=0)
    if longest > most:
        raise ValueError(f"state_indices [N, S] must have S >= {longest} tokens, got S = {most}")
    if accepted is not None and not ((accepted >= 1) & (accepted <= most)).all():
        raise ValueError(f"accepted must lie in 1 to S = {most}, got {accepted.tolist()}")


def run_torch(step: Step) -> None:
    inputs, maps, state, slots, null_index, _, accepted, out = step
    assert slots is not None
    assert out is not None
    # The slot that each row starts from.
    first = slots if slots.ndim == 1 else slots[:, 0]
    if accepted is not None:
        first = slots.gather(1, accepted.long().unsqueeze(1) - 1).squeeze(1)
    ends = offsets_of(inputs.cu_seqlens, inputs.q)
    lengths = ends.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    out.zero_()
    if longest == 0:
        return
    with torch.no_grad():
        place = torch.arange(longest, device=ends.device)
        token = (ends[:-1, None] + place).clamp(max=int(ends[-1]) - 1)
        real = (place < lengths[:, None]) & (first > null_index)[:, None]
        own = read(state, first, null_index, inputs.dtype)
        after = own.new_zeros(len(lengths), longest, *own.shape[1:])
        # Rows that lie end to end, as rows of a batch.
        rows = maps.applied(inputs)._replace(cu_seqlens=None)
        rows = rows.each(lambda x, n: x.flatten(0, 1).unflatten(0, (-1, n))[token].flatten(1, 2))
        o = torch_step(Step(rows, NO_MAPS, own, states=after))
        out.view(-1, *out.shape[2:])[token[real]] = o[real]
        if slots.ndim == 1:
            kept = torch.where(real[:, 0], slots, null_index)
            last = (lengths - 1).clamp(min=0)
            write(state, kept, null_index, after[torch.arange(len(last), device=last.device), last])
        else:
            every = torch.where(real, slots[:, :longest], null_index)
            write(state, every.flatten(), null_index, after.flatten(0, 1))


def run_triton(step: Step) -> None:
    """One kernel, which reads each state once and writes what is asked for."""
    assert step.slots is not None
    triton_step(step._replace(slots=step.slots.contiguous()))


def run_reference_step(step: Step) -> None:
    assert step.out is not None
    inputs, ends = step.maps.applied(step.inputs), offsets_of(step.inputs.cu_seqlens, step.inputs.q)
    step.out.copy_(definition.step(lambda x: run_reference(Request(x)), inputs, step, ends))


BACKENDS = {"triton": run_triton, "torch": run_torch}
step_operator = InPlace("pool_step", Step, BACKENDS, ("state", "out"))

STEPS: Table[Step, None] = forms(why_not_triton, step_operator, run_reference_step)
