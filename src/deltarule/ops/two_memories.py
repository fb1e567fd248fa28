"""Attention to a few slots: one memory of keys, one of values, and a softmax between them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.checks import check_axes, check_gate, check_state, shape
from deltarule.ops.context import Context, check_context
from deltarule.ops.delta_rule.api import delta_rule
from deltarule.ops.delta_rule.step import recurrent_step
from deltarule.ops.few_tokens import decodes
from deltarule.ops.plain import PlainImpl, count_sequences
from deltarule.shapes import Keys, Offsets, Outputs, Queries, RecurrentOutput, Values


class TwoMemories(NamedTuple):
    """Outputs [B, T, H, V], and the memories of keys [N, H, M, K] and of values [N, H, V, M]."""

    o: Outputs
    key_memory: Tensor
    value_memory: Tensor


def two_memories(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    slots: Tensor,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    key_memory: Tensor | None = None,
    value_memory: Tensor | None = None,
    cu_seqlens: Offsets | None = None,
    context: Context | None = None,
    impl: PlainImpl = "auto",
) -> TwoMemories:
    r"""Write keys and values into M slots, and attend to the slots.

    .. math::
        S^k_t &= S^k_{t-1} \mathrm{Diag}(e^{\mathrm{log\_decay}_t}) + k_t \mathrm{slots}_t^\top \\
        S^v_t &= S^v_{t-1} \mathrm{Diag}(e^{\mathrm{log\_decay}_t}) + v_t \mathrm{slots}_t^\top \\
        o_t &= S^v_t \, \mathrm{softmax}\big(\mathrm{scale} \cdot (S^k_t)^\top q_t\big)

    Both memories go through `delta_rule` without erase. In the first pass each slot is a value
    head of one channel, so that its decay is that of a head; in the second a key channel.

    Args:
        q: Queries [B, T, H, K] in float64, float32, bfloat16 or float16.
        k: Keys [B, T, H, K] in q's dtype.
        v: Values [B, T, H, V] in q's dtype.
        slots: How much of a token each slot takes, [B, T, H, M], >= 0.
        log_decay: Natural log of each slot's decay [B, T, H, M], <= 0, float32; -inf is a reset.
            None means no decay.
        scale: Factor inside the softmax. None means K ** -0.5.
        key_memory: Transpose of S^k before the first token [N, H, M, K], float32 (float64 with
            float64 q). None means zeros.
        value_memory: S^v before the first token [N, H, V, M], likewise.
        cu_seqlens: Offsets [N + 1] of sequences packed into one row (B = 1). None means that each
            batch row is a sequence.
        context: The processes that hold the other tokens of the rows; see `delta_rule`. None: all
            tokens are here.
        impl: "auto", "triton", "torch" or "reference"; a named one runs or raises with the reason.

    Returns:
        o [B, T, H, V] in v's dtype, and the two memories after the last token.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device; the message names it.

    Examples:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 10, 2, 4).unbind()
        >>> out = two_memories(q, k, v, slots=torch.rand(1, 10, 2, 3))
        >>> out.o.shape, out.key_memory.shape
        (torch.Size([1, 10, 2, 4]), torch.Size([1, 2, 3, 4]))

    Source: ABC, arXiv 2110.02488, eq. 6; GSA, arXiv 2409.07146, eq. 8. Table 4 of arXiv 2406.06484
    leaves out the transpose of S^k in the read-out, and ABC's normalisation of the slots.
    """
    for name, x in (("q", q), ("slots", slots)):
        check_axes(name, x, "[B, T, H, K or M]", 4)
    batch, tokens, heads, key_size = q.shape
    size = slots.shape[-1]
    check_axes("v", v, "[B, T, H, V]", 4)
    if v.shape[2] != heads:
        raise ValueError(f"v must be [B, T, H, V] with the {heads} heads of q, got {shape(v)}")
    each_slot = {"[B, T, H, M]": (batch, tokens, heads, size)}
    check_gate("slots", slots, q, each_slot)
    check_gate("log_decay", log_decay, q, each_slot)
    if context is not None:
        check_context(context, tokens, "q", cu_seqlens)
    own = count_sequences(q, None, cu_seqlens)
    sequences = own if context is None else context.sequences or batch
    check_state("key_memory", key_memory, q, (sequences, heads, size, key_size))
    check_state("value_memory", value_memory, q, (sequences, heads, v.shape[3], size))
    slots = slots.to(q.dtype)
    of_slots = None if log_decay is None else log_decay.flatten(2)
    given = k, v, slots, log_decay, key_memory, value_memory
    wide = torch.promote_types(q.dtype, torch.float32)
    few = context is None and decodes(q, cu_seqlens, given)

    def recurrence(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: float | None,
        state: Tensor | None,
    ) -> RecurrentOutput:  # fmt: skip
        gates: dict[str, Any] = {"beta": None, "log_decay": log_decay, "scale": scale, "impl": impl}
        if not few:
            gates |= {"cu_seqlens": cu_seqlens, "context": context}
            return delta_rule(q, k, v, **gates, initial_state=state)
        if state is None:
            state = q.new_zeros(q.shape[0], *v.shape[2:], q.shape[3], dtype=wide)
        else:
            state = state.clone()
        return RecurrentOutput(recurrent_step(q, k, v, **gates, state=state), state)

    each = slots.flatten(2).unsqueeze(-1)
    state = None if key_memory is None else key_memory.flatten(1, 2).unsqueeze(2)
    first = recurrence(q, k, each, of_slots, scale, state)
    scores = first.o.unflatten(2, (heads, size)).squeeze(-1)
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(q.dtype)
    second = recurrence(weights, slots, v, log_decay, 1.0, value_memory)
    assert first.final_state is not None
    assert second.final_state is not None
    keys = first.final_state.squeeze(2).unflatten(1, (heads, size))
    return TwoMemories(second.o, keys, second.final_state)
