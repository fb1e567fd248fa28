"""The operator for every rule whose erase is absent, or tied to the key."""

from typing import Any

from deltarule.ops.checks import check_flags
from deltarule.ops.context import Context
from deltarule.ops.delta_rule.implementations import IMPLEMENTATIONS, Request
from deltarule.ops.delta_rule.inputs import Inputs, check_arguments
from deltarule.ops.delta_rule.repeated import eager_key, remember_launches, repeated
from deltarule.ops.delta_rule.spanning import beyond
from deltarule.ops.dispatch import Impl, choose
from deltarule.shapes import Beta, Decay, Keys, Offsets, Queries, RecurrentOutput, State, Values


def delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    beta: Beta | None,
    log_decay: Decay | None = None,
    n_steps: int = 1,
    scale: float | None = None,
    normalize_qk: bool = False,
    initial_state: State | None = None,
    cu_seqlens: Offsets | None = None,
    return_state: bool = True,
    save_states: bool = True,
    batch_invariant: bool = False,
    context: Context | None = None,
    return_transition: bool = False,
    impl: Impl = "auto",
) -> RecurrentOutput:
    r"""Decay a matrix state, erase what it holds under each key, write a value there, and read.

    .. math::
        S &\leftarrow S \, \mathrm{Diag}(e^{\mathrm{log\_decay}_t}) \\
        S &\leftarrow S + \beta_{t,j} (v_{t,j} - S k_{t,j}) k_{t,j}^\top
            \qquad j = 1, \dots, n_\mathrm{steps} \\
        o_t &= \mathrm{scale} \cdot S q_t

    Args:
        q: Queries [B, T, H, K] in float64, float32, bfloat16 or float16.
        k: Keys `[B, T*n, H, K]` in q's dtype; step j of token t is row `t*n + j`.
        v: Values `[B, T*n, HV, V]` in q's dtype; HV is a multiple of H.
        beta: Write strength `[B, T*n, HV]`, in [0, 1], or in [0, 2] for transitions with negative
            eigenvalues, with keys of unit norm: where beta |k|^2 is above 2 the state grows without
            bound. None means no erase: S gains v k^T (linear attention, Mamba-2, GLA).
        log_decay: Natural log of the decay, <= 0, float32: [HV] constant, [B, T, HV] for each
            head or [B, T, HV, K] for each key channel; -inf is a reset. None means no decay.
        n_steps: Writes for each token (DeltaProduct); the read-out comes after the last.
        scale: Factor of the read-out. None means K ** -0.5.
        normalize_qk: Divide q and k by their norm first: x * rsqrt(sum x^2 + 1e-6).
        initial_state: [N, HV, V, K], float32 (float64 with float64 q). None means zeros.
        cu_seqlens: Offsets [N + 1] of sequences packed into one row (B = 1), from 0 to T, counting
            tokens; see `deltarule.pack`. None means that each batch row is a sequence.
        return_state: False gives None in place of the final state.
        save_states: Keep the states of the chunks for the backward; False computes them again
            there and keeps less memory until then.
        batch_invariant: Fix the plan of execution independently of B and N.
        context: What `make_context` returned, if other processes hold the other tokens of the
            rows: all tensors then have the tokens of this process, `cu_seqlens` is None, and
            `initial_state` is that of sequences which begin here. None: all tokens are here.
        return_transition: Return the transition of each sequence too, [N, HV, K, K], or
            [N, HV, K] without an erase: a state S before becomes S M plus what is written.
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
        >>> out = delta_rule(q, k, v, beta=torch.rand(1, 10, 2), normalize_qk=True)
        >>> out.o.shape, out.final_state.shape
        (torch.Size([1, 10, 2, 4]), torch.Size([1, 2, 4, 4]))

    Source: DeltaNet, arXiv 2406.06484, eq. 4 to 6 (its eq. 10 prints I - tril where I + tril is
    right); Gated DeltaNet, arXiv 2412.06464, eq. 10; DeltaProduct, arXiv 2502.10297 (later steps
    multiply on the right).
    """
    tensors = q, k, v, beta, None, None, log_decay, initial_state, cu_seqlens
    options = n_steps, scale, normalize_qk, batch_invariant
    given = tensors, options, impl, save_states, return_state
    if context is not None or return_transition:
        return beyond(recurrence_of, *given, context, return_transition)
    return recurrence_of(*given)


def recurrence_of(
    tensors: tuple[Any, ...], options: tuple[Any, ...], impl: str, save: bool, return_state: bool
) -> RecurrentOutput:
    """Check a call, choose what runs it, and run it: on a GPU, as the last call like it ran.

    `tensors` and `options` are the fields of `Inputs`, in order.
    """
    check_flags({"save_states": save, "return_state": return_state})
    on_gpu = getattr(tensors[0], "is_cuda", False)
    key = eager_key(tensors, options, impl, save) if on_gpu else None
    output = None if key is None else repeated(key, tensors, options)
    if output is None:
        inputs = check_arguments(Inputs(*tensors, *options), options[1])
        call = Request(inputs, save)
        output = choose(IMPLEMENTATIONS, call, impl, inputs.q.device).run(call)
        if key is not None:
            remember_launches(key, tensors, inputs)
    return output if return_state else RecurrentOutput(output.o, None)
