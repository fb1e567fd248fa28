"""The operator of the mesa layer: a ridge regression over all tokens so far, at every token."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from deltarule.ops.checks import check_log_decay, check_scale, check_sequence
from deltarule.ops.context import Context, check_context
from deltarule.ops.context.exchange import starting_state
from deltarule.ops.few_tokens import decodes
from deltarule.ops.fused_kernels import why_not_fused
from deltarule.ops.mesa import definition as reference
from deltarule.ops.mesa import torch as chunked
from deltarule.ops.plain import (
    Arguments,
    PlainImpl,
    check_integer,
    check_per_head,
    check_state_tensor,
    count_sequences,
    forms,
    run_plain,
)
from deltarule.shapes import Beta, Keys, MesaOutput, MesaState, Offsets, Queries, Values

# Key channels of which a program of the Triton kernel holds the rows of its tokens.
MAX_KEY_CHANNELS = 128
# Steps of "auto" beyond K, for what rounding takes where keys prefer some directions.
MORE_ITERATIONS = 64
# A number of steps; None: no steps, an exact solution; "auto": the one that is faster, converged.
Iterations = int | Literal["auto"] | None


def why_not_triton(arguments: Arguments) -> str | None:
    """Why the conjugate gradients do not run in Triton, or None; the rest is PyTorch either way."""
    if (reason := why_not_fused(arguments["q"], "q")) is not None:
        return reason
    if arguments["iterations"] is None:
        return "the exact solution is PyTorch's: give a number of iterations"
    if arguments["q"].shape[3] > MAX_KEY_CHANNELS:
        return (
            f"the Triton kernel takes K up to {MAX_KEY_CHANNELS}, got K = {arguments['q'].shape[3]}"
        )
    return None


def run(arguments: Arguments, backend: str) -> MesaOutput:
    """Chunks, or single tokens where there are few of them and no gradient.

    All is PyTorch's but the hot stage, the conjugate gradients, which the backend runs.
    """
    given = (*arguments.values(), *arguments["initial_state"])
    few = decodes(arguments["q"], arguments["cu_seqlens"], given)
    return (chunked.mesa_step if few else chunked.mesa)(arguments, backend)


IMPLEMENTATIONS = forms(why_not_triton, run, reference.mesa)


def mesa(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    beta: Beta,
    regularizer: Float[Tensor, "HV K"],
    log_decay: Float[Tensor, "HV"] | Float[Tensor, "B T HV"] | None = None,
    iterations: Iterations = "auto",
    scale: float | None = None,
    initial_state: MesaState | None = None,
    cu_seqlens: Offsets | None = None,
    return_state: bool = True,
    context: Context | None = None,
    impl: PlainImpl = "auto",
) -> MesaOutput:
    r"""Keep decayed sums of k k^T and v k^T, and read with the best linear map from k to v.

    .. math::
        H_t &= e^{\mathrm{log\_decay}_t} H_{t-1} + \beta_t k_t k_t^\top \\
        G_t &= e^{\mathrm{log\_decay}_t} G_{t-1} + \beta_t v_t k_t^\top \\
        o_t &= \mathrm{scale} \cdot G_t (H_t + \mathrm{Diag}(\mathrm{regularizer}))^{-1} q_t

    The map minimises the decayed sum of beta |S k - v|^2 plus tr(S Diag(regularizer) S^T).
    Gradients are those of the solution, by implicit differentiation: nothing of the iterations is
    kept, and `iterations` must be enough for them to have converged.

    Args:
        q: Queries [B, T, H, K] in float64, float32, bfloat16 or float16.
        k: Keys [B, T, H, K] in q's dtype; of unit norm, the sums stay well conditioned.
        v: Values [B, T, HV, V] in q's dtype; HV is a multiple of H.
        beta: Weight of each token [B, T, HV], >= 0.
        regularizer: Weight of each squared channel of the map [HV, K], > 0; it does not decay.
        log_decay: Natural log of the decay, <= 0, float32: [HV] constant or [B, T, HV]; -inf
            forgets everything. None means no decay.
        iterations: Steps of the conjugate gradients, the same for every token. None solves exactly,
            with K^3 operations a token. "auto": None on a CPU, where it is faster, and elsewhere
            K + 64; K suffice but for rounding, fewer only where all channels of the keys are about
            equally used.
        scale: Factor of the read-out. None means K ** -0.5.
        initial_state: covariance [N, HV, K, K] and values [N, HV, V, K], float32 (float64 with
            float64 q). None means zeros.
        cu_seqlens: Offsets [N + 1] of sequences packed into one row (B = 1), from 0 to T; see
            `deltarule.pack`. None means that each batch row is a sequence.
        return_state: False gives None in place of the final state.
        context: The processes that hold the other tokens of the rows; see `delta_rule`. None: all
            tokens are here.
        impl: "auto", or a named implementation.

    Returns:
        o [B, T, HV, V] in v's dtype, and final_state, always new tensors. A NaN in a token reaches
        the earlier ones of its chunk of 64 tokens, except in the reference.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device; the message names it.

    Example, a map that 8 tokens determine, recovered:
        >>> import torch
        >>> k, S = torch.randn(1, 8, 1, 4).double(), torch.randn(4, 4).double()
        >>> weak = torch.full((1, 4), 1e-9).double()
        >>> beta = torch.ones(1, 8, 1).double()
        >>> out = mesa(k, k, k @ S.mT, beta=beta, regularizer=weak, iterations=None, scale=1.0)
        >>> bool((out.o - k @ S.mT)[:, -1].abs().max() < 1e-5)
        True

    Source: mesa layer, arXiv 2309.05858; gates and conjugate gradients as in MesaNet, arXiv
    2506.05233. The slides that print a proximal term |S - S'|^2 mean the regulariser above, and
    print v and k of the rank-one update in the wrong order.
    """
    check_sequence(q, k, v, 1)
    heads, value_size, key_size = v.shape[2], v.shape[3], q.shape[3]
    check_per_head("beta", beta, "[B, T, HV]", (*q.shape[:2], heads), q)
    check_per_head("regularizer", regularizer, "[HV, K]", (heads, key_size), q)
    check_log_decay(log_decay, q, heads)
    if log_decay is not None and log_decay.ndim == 4:
        why = "a decay of each key channel would leave no symmetric sum of k k^T"
        raise ValueError(f"log_decay must be [HV] or [B, T, HV], got [B, T, HV, K]: {why}")
    if iterations == "auto":
        exact = q.device.type == "cpu" and impl != "triton"
        iterations = None if exact else key_size + MORE_ITERATIONS
    elif iterations is not None:
        or_else = ', "auto", or None to solve exactly'
        iterations = check_integer("iterations", iterations, 1, or_else)
    if context is not None:
        check_context(context, k.shape[1], "q", cu_seqlens)
        cu_seqlens = context.cu_seqlens(q.device)
    of_all = count_sequences(q, None, cu_seqlens), heads
    sizes = (*of_all, key_size, key_size), (*of_all, value_size, key_size)
    if initial_state is None:
        wide = torch.promote_types(q.dtype, torch.float32)
        initial_state = MesaState(*(q.new_zeros(size, dtype=wide) for size in sizes))
    check_state(initial_state, sizes, q)
    if context is not None:
        initial_state = starting_sums(context, k, v, beta, log_decay, initial_state)
    scale = key_size**-0.5 if scale is None else check_scale(scale)
    arguments: Arguments = {"q": q, "k": k, "v": v, "beta": beta, "regularizer": regularizer}
    arguments |= {"log_decay": log_decay, "iterations": iterations, "scale": scale}
    arguments |= {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    return run_plain(IMPLEMENTATIONS, arguments, impl, q.device, return_state)


def check_state(state: MesaState, sizes: tuple[tuple[int, ...], ...], q: Tensor) -> None:
    if not isinstance(state, tuple) or len(state) != 2:
        raise ValueError(
            f"initial_state must be a MesaState(covariance, values), got {type(state).__name__}"
        )
    check_state_tensor("initial_state.covariance", state[0], "[N, HV, K, K]", sizes[0], q)
    check_state_tensor("initial_state.values", state[1], "[N, HV, V, K]", sizes[1], q)


def starting_sums(
    context: Context, k: Keys, v: Values, beta: Beta, log_decay: Tensor | None,
    given: MesaState,
) -> MesaState:  # fmt: skip
    """Return the sums before each sequence here, as given where it begins here.

    What is read is not linear in the sums, but the sums are: with w_t = exp(the decays after t)

        U = sum_t w_t beta_t [v_t; k_t] k_t^T        M = exp(all decays), one number a head
    """
    first, heads, dtype = len(k), v.shape[2], torch.promote_types(k.dtype, torch.float32)
    key_size, value_size = k.shape[3], v.shape[3]
    start = torch.cat([given.values, given.covariance], -2)
    k, v = (x[:, context.tail :].to(dtype) for x in (k, v))
    decay = torch.zeros_like(beta, dtype=dtype)
    if log_decay is not None:
        decay = log_decay.to(dtype).expand_as(beta)
    decay, weight = decay[:, context.tail :], beta[:, context.tail :].to(dtype)
    # The decays after each token; by sums from the end, since a reset is -inf.
    after = F.pad(decay.flip(1).cumsum(1).flip(1)[:, 1:], (0, 0, 0, 1))
    keys = k.repeat_interleave(heads // k.shape[2], 2)
    written = torch.cat([v, keys], -1) * (weight * after.exp()).unsqueeze(-1)
    kept = decay.sum(1).exp()[..., None, None]
    end = torch.einsum("bthv, bthk -> bhvk", written, keys) + start[-first:] * kept
    carried = float(context.goes_on and not context.starts)
    transition = (carried * kept).expand(-1, -1, -1, key_size)
    before = starting_state(context, end, transition)
    start = torch.cat([start[:first] + before, start[first:]])
    return MesaState(start[:, :, value_size:], start[:, :, :value_size])
