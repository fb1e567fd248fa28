"""The operator of test-time training: a network that learns the sequence while it is read."""

import math
from numbers import Real

from jaxtyping import Float, Int
from torch import Tensor

from deltarule.ops.memory import definition as reference
from deltarule.ops.memory.inputs import check_call, check_memory, why_not_triton
from deltarule.ops.memory.torch import operators
from deltarule.ops.plain import Arguments, PlainImpl, check_per_head, forms, run_plain
from deltarule.shapes import Beta, Keys, Offsets, Queries, TTTOutput, TTTState, Values

# Mini-batches are laid out in PyTorch; the hot stage, the scan over them, is the backend's.
IMPLEMENTATIONS = forms(
    lambda arguments: why_not_triton(arguments, len(arguments["step_scale"])),
    operators.ttt,
    reference.ttt,
)


def ttt(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    beta: Beta,
    step_scale: Float[Tensor, "C"],
    norm_weight: Float[Tensor, "HV V"],
    norm_bias: Float[Tensor, "HV V"],
    norm_eps: float = 1e-6,
    initial_state: TTTState,
    lengths: Int[Tensor, "B"] | None = None,
    cu_seqlens: Offsets | None = None,
    return_state: bool = True,
    impl: PlainImpl = "auto",
) -> TTTOutput:
    r"""Train a small network on (k, v) by gradient steps in mini-batches, and read it with q.

    .. math::
        f_W(x) &= x + \mathrm{LN}(W(x)) \qquad
            \ell_i(W) = \tfrac12 \lVert f_W(k_i) - v_i \rVert^2 \\
        W_t &= W_0 - \mathrm{step\_scale}_t \sum_{i \le t} \beta_i \nabla \ell_i(W_0) \\
        o_t &= f_{W_t}(q_t)

    t counts in mini-batches of C tokens, from the start of each sequence; W_0 is the memory before
    the mini-batch, and the W_t of its last token is that of the next. One map is TTT-linear; two,
    with GELU (its form with tanh) between them, are TTT-MLP. The computation is the dual form.

    Args:
        q: Queries [B, T, H, K] in float64, float32, bfloat16 or float16.
        k: Keys [B, T, H, K] in q's dtype.
        v: Values [B, T, HV, V] in q's dtype; HV is a multiple of H, and V = K.
        beta: Inner learning rate of each token [B, T, HV].
        step_scale: Factor of the sum at each place of a mini-batch, [C]; its length is the size
            of a mini-batch. The paper starts it at 1, 1/2, .., 1/C.
        norm_weight: Weight of the layer norm of each head [HV, V].
        norm_bias: Its bias [HV, V].
        norm_eps: Added to its variance.
        initial_state: The memory before the first token, `TTTState.start(weights, N)` or what an
            earlier call returned: maps [N, HV, outputs, inputs + 1], the last column the bias.
        lengths: [B] int64, the number of real tokens at the front of each row; outputs at the
            others mean nothing. None means all.
        cu_seqlens: Offsets [N + 1] of sequences packed into one row (B = 1), from 0 to T; see
            `deltarule.pack`. None means that each batch row is a sequence.
        return_state: False gives None in place of the final state.
        impl: "auto", or a named implementation; "reference" is the primal form.

    Returns:
        o [B, T, HV, V] in v's dtype, and final_state, always new tensors. A NaN in a token reaches
        the earlier ones of its mini-batch, except in the reference.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device; the message names it.

    Examples:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 40, 2, 4).unbind()
        >>> start = TTTState.start((0.02 * torch.randn(2, 4, 5),), 1)
        >>> out = ttt(
        ...     q, k, v, beta=torch.rand(1, 40, 2), step_scale=1 / torch.arange(1, 17),
        ...     norm_weight=torch.ones(2, 4), norm_bias=torch.zeros(2, 4), initial_state=start,
        ... )
        >>> out.o.shape, out.final_state.position
        (torch.Size([1, 40, 2, 4]), tensor([8]))

    Source: arXiv 2407.04620, eq. 4 and 5, section 2.5 (mini-batches and dual form) and 2.7
    (learning rate). In the authors' code the read-out is q + LN(W q), as here.
    """
    sequences = check_call(q, k, v, beta, lengths, cu_seqlens)
    heads, channels = v.shape[2:]
    if channels != q.shape[3]:
        raise ValueError(
            f"v must have the K={q.shape[3]} channels of q and k, which the network adds to its "
            f"output, got {channels}"
        )
    if not isinstance(step_scale, Tensor) or step_scale.ndim != 1 or len(step_scale) == 0:
        raise ValueError(f"step_scale must be a tensor [C], C of 1 or more, got {step_scale!r}")
    check_per_head("step_scale", step_scale, "[C]", (len(step_scale),), q)
    check_per_head("norm_weight", norm_weight, "[HV, V]", (heads, channels), q)
    check_per_head("norm_bias", norm_bias, "[HV, V]", (heads, channels), q)
    if isinstance(norm_eps, bool) or not isinstance(norm_eps, Real) or not 0 < norm_eps < math.inf:
        raise ValueError(f"norm_eps must be a finite number above 0, got {norm_eps!r}")
    check_memory(initial_state, TTTState, len(step_scale), sequences, q, v)
    arguments: Arguments = {"q": q, "k": k, "v": v, "beta": beta, "step_scale": step_scale}
    arguments |= {"norm_weight": norm_weight, "norm_bias": norm_bias, "norm_eps": float(norm_eps)}
    arguments |= {"initial_state": initial_state, "lengths": lengths, "cu_seqlens": cu_seqlens}
    return run_plain(IMPLEMENTATIONS, arguments, impl, q.device, return_state)
