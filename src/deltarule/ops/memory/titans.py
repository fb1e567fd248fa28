"""The operator of Titans' neural memory: gradient steps with momentum and forgetting."""

from jaxtyping import Float, Int
from torch import Tensor

from deltarule.ops.checks import check_gate, check_log_decay
from deltarule.ops.memory import definition as reference
from deltarule.ops.memory.inputs import check_call, check_memory, why_not_triton
from deltarule.ops.memory.torch import operators
from deltarule.ops.plain import Arguments, PlainImpl, check_integer, forms, run_plain
from deltarule.shapes import Beta, Keys, Offsets, Queries, TitansOutput, TitansState, Values

# Mini-batches are laid out in PyTorch; the hot stage, the scan over them, is the backend's.
IMPLEMENTATIONS = forms(
    lambda arguments: why_not_triton(arguments, arguments["mini_batch"]),
    operators.titans,
    reference.titans,
)


def titans(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    beta: Beta,
    momentum: Float[Tensor, "B T HV"] | None = None,
    log_decay: Float[Tensor, "HV"] | Float[Tensor, "B T HV"] | None = None,
    mini_batch: int = 16,
    initial_state: TitansState,
    lengths: Int[Tensor, "B"] | None = None,
    cu_seqlens: Offsets | None = None,
    return_state: bool = True,
    impl: PlainImpl = "auto",
) -> TitansOutput:
    r"""Train a small network on (k, v) with momentum and weight decay, and read it with q.

    .. math::
        S_t &= \mathrm{momentum}_t S_{t-1} - \beta_t \nabla \lVert M(k_t) - v_t \rVert^2 \\
        M_t &= e^{\mathrm{log\_decay}_t} M_{t-1} + S_t \qquad o_t = M_t(q_t)

    The gradient is taken at the memory before the token's mini-batch, mini-batches being counted
    from the start of each sequence; with mini-batches of one token it is that before the token.
    One map is a linear memory; two, with GELU (its form with tanh) between them, are an MLP.

    Args:
        q: Queries [B, T, H, K] in float64, float32, bfloat16 or float16.
        k: Keys [B, T, H, K] in q's dtype; of unit norm, a step of beta <= 1/2 does not overshoot.
        v: Values [B, T, HV, V] in q's dtype; HV is a multiple of H.
        beta: Learning rate of each token [B, T, HV] (theta).
        momentum: How much of the last surprise is kept [B, T, HV], in [0, 1] (eta). None: nothing.
        log_decay: Natural log of what is kept of the memory (1 - alpha), <= 0, float32: [HV] or
            [B, T, HV]. None means that nothing is forgotten.
        mini_batch: Tokens whose gradients are taken at one memory.
        initial_state: The memory before the first token, `TitansState.start(weights, N)` or what
            an earlier call returned: maps [N, HV, outputs, inputs].
        lengths: [B] int64, the number of real tokens at the front of each row; outputs at the
            others mean nothing. None means all.
        cu_seqlens: Offsets [N + 1] of sequences packed into one row (B = 1), from 0 to T; see
            `deltarule.pack`. None means that each batch row is a sequence.
        return_state: False gives None in place of the final state.
        impl: "auto", or a named implementation.

    Returns:
        o [B, T, HV, V] in v's dtype, and final_state, always new tensors. A NaN in a token reaches
        the earlier ones of its mini-batch, except in the reference.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device; the message names it.

    Example, DeltaNet as the special case without momentum and decay:
        >>> import torch
        >>> from deltarule import delta_rule
        >>> q, k, v = torch.nn.functional.normalize(torch.randn(3, 1, 9, 2, 4), dim=-1).unbind()
        >>> beta, start = torch.rand(1, 9, 2), TitansState.start((torch.zeros(2, 4, 4),), 1)
        >>> out = titans(q, k, v, beta=beta / 2, mini_batch=1, initial_state=start)
        >>> expected = delta_rule(q, k, v, beta=beta, scale=1.0)
        >>> bool((out.o - expected.o).abs().max() < 1e-5)
        True

    Source: arXiv 2501.00663, eq. 8 to 15 (surprise, forgetting, read-out) and section 3.2
    (gradients by chunks).
    """
    sequences = check_call(q, k, v, beta, lengths, cu_seqlens)
    heads = v.shape[2]
    check_gate("momentum", momentum, q, {"[B, T, HV]": (*q.shape[:2], heads)})
    check_log_decay(log_decay, q, heads)
    if log_decay is not None and log_decay.ndim == 4:
        raise ValueError(f"log_decay must be [HV] or [B, T, HV], got {[*log_decay.shape]}")
    mini_batch = check_integer("mini_batch", mini_batch, 1)
    check_memory(initial_state, TitansState, mini_batch, sequences, q, v)
    arguments: Arguments = {"q": q, "k": k, "v": v, "beta": beta, "momentum": momentum}
    arguments |= {"log_decay": log_decay, "mini_batch": mini_batch, "lengths": lengths}
    arguments |= {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    return run_plain(IMPLEMENTATIONS, arguments, impl, q.device, return_state)
