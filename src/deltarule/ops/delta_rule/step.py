"""The operator for decoding: a few new tokens, the state updated in place."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deltarule.ops.delta_rule import definition
from deltarule.ops.delta_rule.gate_logits import BetaLogits, DecayLogits, Step, apart, checked
from deltarule.ops.delta_rule.implementations import Request, run_reference
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.torch.step import recurrent_step as torch_step
from deltarule.ops.dispatch import Table, choose, why_no_triton
from deltarule.ops.few_tokens import MAX_TOKENS, check_no_gradient
from deltarule.ops.history import offsets_of
from deltarule.ops.in_place import InPlace
from deltarule.ops.plain import PlainImpl, forms
from deltarule.ops.pools import check_indices, check_pool, check_room
from deltarule.shapes import Beta, Decay, Erase, Keys, Outputs, Queries, State, Values

MAX_KEY_CHANNELS = 256
STATE_DTYPES = {
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.float64: (torch.float64,),
}


def recurrent_step(
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
    state_indices: Tensor | None = None,
    null_index: int = -1,
    states: Tensor | None = None,
    impl: PlainImpl = "auto",
) -> Outputs:
    r"""Carry a state over 1 to 16 new tokens, writing it back in place.

    .. math::
        S \leftarrow S A_t + w_t k_t^\top \qquad o_t = \mathrm{scale} \cdot S q_t

    The transition is that of `delta_rule`, or with `a` and `b` that of `dplr`. There is no
    gradient.

    Args:
        q: Queries [B, T, H, K] in float64, float32, bfloat16 or float16, T from 1 to 16.
        k: Keys `[B, T*n, H, K]` in q's dtype.
        v: Values `[B, T*n, HV, V]` in q's dtype; HV is a multiple of H.
        beta: Write strength `[B, T*n, HV]` in [0, 2], or `BetaLogits(logits, beta_max)` of the same
            shape: beta_max * sigmoid(logits). None, written out, means no tied erase.
        log_decay: Natural log of the decay, <= 0, float32: [HV], [B, T, HV] or [B, T, HV, K]; or
            `DecayLogits(logits, A_log, dt_bias)`: -exp(A_log) * softplus(logits + dt_bias).
            With its `lower_bound`: lower_bound * sigmoid(exp(A_log) * (logits + dt_bias)).
            None means no decay.
        a: Erase query [B, T, HV, K], together with `b` and without `beta`. None means none.
        b: Erase key [B, T, HV, K].
        n_steps: Writes for each token; 1 with `a` and `b`.
        scale: Factor of the read-out. None means K ** -0.5.
        normalize_qk: Divide q and k by their norm first; False with `a` and `b`.
        state: [B, HV, V, K], or a pool [slots, HV, V, K] with `state_indices`; float32,
            bfloat16 or float16 (float64 with float64 q). It is overwritten.
        state_indices: Slot of each batch row [B], int32 or int64; no slot twice (checked on the
            CPU). None means that row i has slot i.
        null_index: Rows with this index read nothing, write nothing and give zeros.
        states: Where the state after each token goes, [B, T, HV, V, K] in state's dtype,
            contiguous: states[:, m - 1] is, bit for bit, what `state` would be after the first m
            of these tokens, so that drafted tokens can be taken back. None keeps none.
        impl: "auto", or a named implementation, which runs or raises with the reason.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device, or needs a gradient.

    Examples:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 1, 2, 4).unbind()
        >>> state = torch.zeros(1, 2, 4, 4)
        >>> recurrent_step(q, k, v, beta=torch.rand(1, 1, 2), state=state).shape
        torch.Size([1, 1, 2, 4])

    Source: the recurrences of `delta_rule` and `dplr`, one token at a time.
    """
    inputs = Inputs(q, k, v, None, a, b, n_steps=n_steps, normalize_qk=normalize_qk)
    inputs, maps = checked(inputs, scale, beta, log_decay)
    step = Step(inputs, maps, state, state_indices, null_index, states)
    check_step(step)
    return choose(STEPS, step, impl, state.device).run(step)


def next_step(arguments: Mapping[str, Any], state: Tensor, states: Tensor | None) -> Tensor:
    """`recurrent_step` of arguments that differ in their numbers from some that were checked.

    On the host the checks take as long as a quarter of the step.
    """
    q, beta, log_decay = arguments["q"], arguments.get("beta"), arguments.get("log_decay")
    inputs = Inputs(**{"scale": q.shape[3] ** -0.5, **arguments})
    step = Step(*apart(inputs, beta, log_decay), state, states=states)
    return choose(STEPS, step, "auto", state.device).run(step)


def check_step(step: Step) -> None:
    """What a step asks beyond the checks of the operators."""
    inputs, state = step.inputs, step.state
    if not 1 <= inputs.q.shape[1] <= MAX_TOKENS:
        given = f"T = {inputs.q.shape[1]}: for more, call delta_rule or dplr with initial_state"
        raise ValueError(f"q must hold 1 to {MAX_TOKENS} tokens, got {given}")
    dtypes, batch = STATE_DTYPES[inputs.dtype], inputs.q.shape[0]
    check_pool(state, "[slots, HV, V, K]", inputs.state_shape[1:], dtypes, inputs.q)
    if step.slots is not None:
        null = step.null_index
        check_indices("state_indices", step.slots, "[B]", batch, state, null, below=False)
    elif state.shape[0] != batch:
        raise ValueError(
            f"state must have B = {batch} rows without state_indices, got {state.shape[0]}"
        )
    room = *inputs.output_shape, inputs.q.shape[3]
    check_room("states", step.states, "[B, T, HV, V, K]", room, state)
    check_no_gradient("recurrent_step", step.tensors)


def reference_step(step: Step) -> Tensor:
    """The definition, from the picked slots and back into them, row by row."""
    inputs, slots, null = step.maps.applied(step.inputs), step.slots, step.null_index
    slots = torch.arange(len(inputs.q)) if slots is None else torch.where(slots == null, -1, slots)
    call, ends = step._replace(slots=slots, null_index=-1), offsets_of(None, inputs.q)
    return definition.step(lambda x: run_reference(Request(x)), inputs, call, ends)


def triton_step(step: Step) -> Tensor:
    """The Triton kernel, whose module only a GPU needs."""
    from deltarule.ops.delta_rule.triton.step import recurrent_step

    return recurrent_step(step)


BACKENDS = {"triton": triton_step, "torch": torch_step}
step_operator = InPlace(
    "recurrent_step", Step, BACKENDS, ("state", "states"),
    fake=lambda step: step.inputs.v.new_empty(step.inputs.output_shape),
)  # fmt: skip


def why_not_triton(step: Step) -> str | None:
    inputs, state = step.inputs, step.state
    if reason := why_no_triton("state", state):
        return reason
    if inputs.q.dtype == torch.float64:
        return "the Triton kernel computes in float32, and q is float64"
    if inputs.q.shape[3] > MAX_KEY_CHANNELS:
        return f"the Triton kernel takes K up to {MAX_KEY_CHANNELS}, got {inputs.q.shape[3]}"
    if state.stride(-1) != 1:
        return "the Triton kernel needs state.stride(-1) == 1, a row's channels side by side"
    return None


STEPS: Table[Step, Tensor] = forms(why_not_triton, step_operator, reference_step)
