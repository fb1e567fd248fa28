"""The operators for every rule whose erase is absent, tied to the key, or free."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.checks import result
from deltarule.ops.context import Context
from deltarule.ops.delta_rule.implementations import (
    IMPLEMENTATIONS,
    Request,
    anything_failed,
    recording_of,
    recurrence_operator,
)
from deltarule.ops.delta_rule.inputs import Inputs, check_arguments
from deltarule.ops.delta_rule.spanning import beyond
from deltarule.ops.dispatch import (
    CallKey,
    Impl,
    call_key,
    choose,
    is_plain_eager,
    recordings,
    remember,
)
from deltarule.ops.registration import differentiated
from deltarule.shapes import (
    Beta,
    Decay,
    Erase,
    Keys,
    Offsets,
    Queries,
    RecurrentOutput,
    State,
    Values,
)

# What runs the Triton kernels.
IMPLS = ("auto", "triton")
# Before the key of calls that a backward may follow.
TRAINING = "training"


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
            eigenvalues. None means no erase: S gains v k^T (linear attention, Mamba-2, GLA).
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
            there, for less memory in between.
        batch_invariant: Fix the plan of execution independently of B and N.
        context: The processes that hold the other tokens of the rows, of `make_context`; all
            tensors then have the tokens of this process, `cu_seqlens` is None, and
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
    if context is not None or return_transition:
        given = {
            "q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay, "n_steps": n_steps,
            "scale": scale, "normalize_qk": normalize_qk, "initial_state": initial_state,
            "cu_seqlens": cu_seqlens, "return_state": return_state, "save_states": save_states,
            "batch_invariant": batch_invariant, "impl": impl,
        }  # fmt: skip
        return beyond(delta_rule, given, context, return_transition)
    tensors = q, k, v, beta, None, None, log_decay, initial_state, cu_seqlens
    options = n_steps, scale, normalize_qk, batch_invariant
    return result(recurrence_of(tensors, options, impl, save_states), return_state)


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
    grow: RWKV-7 takes a = -k', b = alpha * k' with a unit k' and alpha in [0, 1].

    Args:
        q: Queries [B, T, H, K] in float64, float32, bfloat16 or float16.
        k: Keys [B, T, H, K] in q's dtype.
        v: Values [B, T, HV, V] in q's dtype; HV is a multiple of H.
        a: Erase query [B, T, HV, K]: what the state is read with before it is erased.
        b: Erase key [B, T, HV, K]: where that reading is added.
        log_decay: Natural log of the decay, <= 0, float32: [HV], [B, T, HV] or [B, T, HV, K];
            -inf is a reset of the diagonal part. None means no decay.
        scale: Factor of the read-out. None means K ** -0.5.
        initial_state: [N, HV, V, K], float32 (float64 with float64 q). None means zeros.
        cu_seqlens: Offsets [N + 1] of sequences packed into one row (B = 1). None means that each
            batch row is a sequence.
        return_state: False gives None in place of the final state.
        save_states: Keep the states of the chunks for the backward; False computes them again
            there, for less memory in between.
        batch_invariant: Fix the plan of execution independently of B and N.
        context: The processes that hold the other tokens of the rows, of `make_context`; all
            tensors then have the tokens of this process, `cu_seqlens` is None, and
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
        >>> erase = torch.nn.functional.normalize(torch.randn(1, 10, 2, 4), dim=-1)
        >>> dplr(q, k, v, a=-erase, b=0.5 * erase).o.shape
        torch.Size([1, 10, 2, 4])

    Source: RWKV-7, arXiv 2503.14456.
    """
    for name, x in (("a", a), ("b", b)):
        if x is None:
            raise ValueError(
                f"{name} must be a tensor [B, T, HV, K], got None: without a free "
                "erase, use delta_rule"
            )
    if context is not None or return_transition:
        given = {
            "q": q, "k": k, "v": v, "a": a, "b": b, "log_decay": log_decay, "scale": scale,
            "initial_state": initial_state, "cu_seqlens": cu_seqlens,
            "return_state": return_state, "save_states": save_states,
            "batch_invariant": batch_invariant, "impl": impl,
        }  # fmt: skip
        return beyond(dplr, given, context, return_transition)
    tensors = q, k, v, None, a, b, log_decay, initial_state, cu_seqlens
    options = 1, scale, False, batch_invariant
    return result(recurrence_of(tensors, options, impl, save_states), return_state)


def recurrence_of(
    tensors: tuple[Any, ...], options: tuple[Any, ...], impl: str, save_states: bool
) -> RecurrentOutput:
    """Check a call, choose what runs it, and run it: on a GPU, as the last call like it ran.

    `tensors` and `options` are the fields of `Inputs`, in order.
    """
    n_steps, scale, normalize_qk, batch_invariant = options
    kind = eager_kind(tensors, n_steps, scale, normalize_qk, batch_invariant, impl)
    if (again := repeated(kind, tensors, save_states)) is not None:
        return again
    inputs = check_arguments(*tensors, *options)
    call = Request(inputs, save_states)
    output = choose(IMPLEMENTATIONS, call, impl, inputs.q.device).run(call)
    return remembered(kind, tensors, inputs, output, save_states)


# Eager calls like one before go straight to the launches recorded of it.
#
# What was checked, chosen and planned for a call holds for every call of its kind. Where nothing
# has to be told of a call (no compiler, transform or mode), it is its launches alone; where a
# backward may follow, they stand in the place of the forward of a plain autograd function.


class Training(NamedTuple):
    """The launches of a forward that saves, and its arguments after the tensors."""

    recording: Any
    numbers: tuple[Any, ...]


def eager_kind(
    tensors: Sequence[Any], n_steps: object, scale: object, normalize_qk: object,
    batch_invariant: object, impl: object,
) -> CallKey | None:  # fmt: skip
    """The kind of a call, before any check of it; None if it may be more than its launches.

    `tensors` are those of `Inputs`, in order.
    """
    q = tensors[0]
    if not isinstance(q, Tensor) or not q.is_cuda or impl not in IMPLS or not is_plain_eager():
        return None
    if torch.autograd.forward_ad._current_level >= 0 or anything_failed():
        return None
    # 1, 1.0 and True are equal, and not all of them pass the checks.
    numbers = type(n_steps) is int and (scale is None or type(scale) is float)
    if not numbers or type(normalize_qk) is not bool or type(batch_invariant) is not bool:
        return None
    return call_key(tensors, n_steps, scale, normalize_qk, batch_invariant)


def repeated(
    kind: CallKey | None, tensors: Sequence[Any], save_states: bool
) -> RecurrentOutput | None:
    """The outputs of one more call of the kind, where its launches are known."""
    if kind is None:
        return None
    if differentiated(kind.given):
        found = recordings.get((TRAINING, kind.key)) if save_states else None
        if found is None:
            return None
        run = partial(found.recording.repeated, kind)
        return RecurrentOutput(*recurrence_operator.apply(*tensors, *found.numbers, run))
    found = recordings.get(kind.key)
    if found is None or (outputs := found.repeated(kind)) is None:
        return None
    return RecurrentOutput(outputs[0], outputs[1])


def remembered(
    kind: CallKey | None, tensors: Sequence[Any], inputs: Inputs, output: RecurrentOutput,
    save_states: bool,
) -> RecurrentOutput:  # fmt: skip
    """The output, after the launches of its call, if they were recorded, are known by its kind."""
    # Where nothing was recorded, there may be no Triton to ask.
    if kind is None or not recordings:
        return output
    training = differentiated(kind.given)
    if (found := recording_of(inputs, training and save_states)) is None:
        return output
    if not training:
        remember(recordings, kind.key, found)
    # A constant decay has its gradient from that of the decay of every token.
    elif save_states and inputs.log_decay is tensors[6]:
        remember(recordings, (TRAINING, kind.key), Training(found, (*inputs[9:], True, "triton")))
    return output
