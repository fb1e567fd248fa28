"""The operator for every rule whose erase is free."""

from deltarule.ops.context import Context
from deltarule.ops.delta_rule.api import recurrence_of
from deltarule.ops.delta_rule.spanning import beyond
from deltarule.ops.dispatch import Impl
from deltarule.shapes import Decay, Erase, Keys, Offsets, Queries, RecurrentOutput, State, Values


def dplr(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    a: Erase,
    b: Erase,
    log_decay: Decay | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    cu_seqlens: Offsets | None = None,
    return_state: bool = True,
    save_states: bool = True,
    batch_invariant: bool = False,
    context: Context | None = None,
    return_transition: bool = False,
    impl: Impl = "auto",
) -> RecurrentOutput:
    r"""Multiply a matrix state by a diagonal plus a rank-one matrix, write a value, and read it.

    .. math::
        S_t &= S_{t-1} (\mathrm{Diag}(e^{\mathrm{log\_decay}_t}) + a_t b_t^\top) + v_t k_t^\top \\
        o_t &= \mathrm{scale} \cdot S_t q_t

    The rank-one matrix sees the undecayed state. Choose a and b so that the transition does not
    grow: RWKV-7 takes a = -u, b = r * u with a unit vector u and r in [0, 1] for each channel.

    Args:
        q: Queries [B, T, H, K] in float64, float32, bfloat16 or float16.
        k: Keys [B, T, H, K] in q's dtype.
        v: Values [B, T, HV, V] in q's dtype; HV is a multiple of H.
        a: Erase query [B, T, HV, K]: the vector with which the old state is read.
        b: Erase key [B, T, HV, K]: the vector along which that reading is added.
        log_decay: Natural log of the decay, <= 0, float32: [HV], [B, T, HV] or [B, T, HV, K];
            -inf is a reset of the diagonal part. None means no decay.
        scale: Factor of the read-out. None means K ** -0.5.
        initial_state: [N, HV, V, K], float32 (float64 with float64 q). None means zeros.
        cu_seqlens: Offsets [N + 1] of sequences packed into one row (B = 1). None means that each
            batch row is a sequence.
        return_state: False gives None in place of the final state.
        save_states: Keep the states of the chunks for the backward; False computes them again
            there and keeps less memory until then.
        batch_invariant: Fix the plan of execution independently of B and N.
        context: What `make_context` returned, if other processes hold the other tokens of the
            rows: all tensors then have the tokens of this process, `cu_seqlens` is None, and
            `initial_state` is that of sequences which begin here. None: all tokens are here.
        return_transition: Return the transition of each sequence too, [N, HV, K, K]: a state S
            before becomes S M plus what is written.
        impl: "auto", or a named implementation, which runs or raises with the reason.

    Returns:
        o [B, T, HV, V] in v's dtype, and final_state [N, HV, V, K], always a new tensor; with
        return_transition a `TransitionOutput` of these two, which has `transition`. With a context
        the states are those after each sequence's last token here. A NaN or an infinity in a token
        reaches no earlier one on a CPU; in chunks on another device it may, within its chunk.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device; the message names it.

    Examples:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 10, 2, 4).unbind()
        >>> erase = torch.nn.functional.normalize(torch.randn(1, 10, 2, 4), dim=-1)
        >>> dplr(q, k, v, a=-erase, b=0.5 * erase).o.shape
        torch.Size([1, 10, 2, 4])

    Source: RWKV-7, arXiv 2503.14456.
    """
    for name, x in (("a", a), ("b", b)):
        if x is None:
            why = "without a free erase, use delta_rule"
            raise ValueError(f"{name} must be a tensor [B, T, HV, K], got None: {why}")
    tensors = q, k, v, None, a, b, log_decay, initial_state, cu_seqlens
    options = 1, scale, False, batch_invariant
    given = tensors, options, impl, save_states, return_state
    if context is not None or return_transition:
        return beyond(recurrence_of, *given, context, return_transition)
    return recurrence_of(*given)
