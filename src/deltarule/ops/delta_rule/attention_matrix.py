"""The matrix that an operator multiplies its values by, drawn out in full."""

import torch
from torch import Tensor

from deltarule.ops.checks import check_axes, check_dense
from deltarule.ops.delta_rule.api import delta_rule
from deltarule.ops.dispatch import Impl
from deltarule.shapes import Beta, Decay, Keys, Queries


def attention_matrix(
    q: Queries,
    k: Keys,
    *,
    beta: Beta | None,
    log_decay: Decay | None = None,
    n_steps: int = 1,
    scale: float | None = None,
    normalize_qk: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    r"""Write out the matrix W of o = W v, which a linear recurrence never forms.

    .. math::
        W_{ts} &= \mathrm{scale} \cdot \beta_s \, k_s^\top A_{s+1} A_{s+2} \cdots A_t \, q_t
            \qquad s \le t \\
        A_t &= \mathrm{Diag}(e^{\mathrm{log\_decay}_t}) (I - \beta_t k_t k_t^\top)

    Row t says how much of the value written at s the query at t reads. It takes O(T^2) memory:
    meant for inspection, not for computing outputs.

    Args:
        q: Queries [B, T, H, K] in float64, float32, bfloat16 or float16.
        k: Keys `[B, T*n, H, K]` in q's dtype.
        beta: Write strength `[B, T*n, HV]` in [0, 2]. None means no erase and a strength of 1.
        log_decay: Natural log of the decay, <= 0, float32: [HV], [B, T, HV] or [B, T, HV, K]. None
            means no decay.
        n_steps: Writes for each token.
        scale: Factor of the read-out. None means K ** -0.5.
        normalize_qk: Divide q and k by their norm first: x * rsqrt(sum x^2 + 1e-6).
        impl: "auto", or a named implementation of `delta_rule`.

    Returns:
        W `[B, HV, T, T*n]` in q's dtype, zero where s is later than t.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device; the message names it.

    Examples:
        >>> import torch
        >>> q, k = torch.randn(2, 1, 6, 1, 4).unbind()
        >>> W = attention_matrix(q, k, beta=torch.rand(1, 6, 1), normalize_qk=True)
        >>> W.shape, bool((W.triu(1) == 0).all())
        (torch.Size([1, 1, 6, 6]), True)

    Source: DeltaNet, arXiv 2406.06484, section 3.2, whose print leaves out the beta_s.
    """
    for name, x in (("q", q), ("k", k)):
        check_axes(name, x, "[B, T or T*n, H, K]", 4)
    batch, rows = k.shape[:2]
    heads = _value_heads(k, beta, log_decay)
    if rows == 0:
        return q.new_zeros(batch, heads, q.shape[1], 0)
    # Values that are unit vectors come out as the columns of the matrix.
    unit = torch.eye(rows, dtype=k.dtype, device=k.device)[None, :, None, :]
    out = delta_rule(
        q, k, unit.expand(batch, rows, heads, rows), beta=beta, log_decay=log_decay,
        n_steps=n_steps, scale=scale, normalize_qk=normalize_qk, return_state=False, impl=impl,
    )  # fmt: skip
    return out.o.transpose(1, 2)


def _value_heads(k: Tensor, beta: Tensor | None, log_decay: Tensor | None) -> int:
    """HV, which only the gates can tell; without gates it is H."""
    heads = k.shape[2]
    constant = isinstance(log_decay, Tensor) and log_decay.ndim == 1
    for name, gate, axis in (("beta", beta, 2), ("log_decay", log_decay, 0 if constant else 2)):
        if not isinstance(gate, Tensor):
            continue
        check_dense(name, gate)
        if gate.ndim <= axis:
            continue
        found = gate.shape[axis]
        if found == 0 or found % heads:
            raise ValueError(
                f"{name} must have a multiple of the {heads} heads of q and k, got {found}"
            )
        return found
    return heads
