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
    r"""Write out the matrix A of o = A v, which a linear recurrence never forms.

    .. math::
        A_{ij} = \mathrm{scale} \cdot \beta_j \, k_j^\top
            \Big( \prod_{s=j+1}^{i} \mathrm{Diag}(\alpha_s) (I - \beta_s k_s k_s^\top) \Big) q_i
            \qquad j \le i

    Row i says how much of the value written at j the query at i reads. It takes O(T^2) memory:
    meant for inspection, not for computing outputs.

    Args:
        q: Queries [B, T, H, K].
        k: Keys `[B, T*n, H, K]`.
        beta: Write strength `[B, T*n, HV]`. None means no erase and a strength of 1.
        log_decay: [HV], [B, T, HV] or [B, T, HV, K], natural log, float32. None means no decay.
        n_steps: Writes for each token.
        scale: Factor of the read-out. None means K ** -0.5.
        normalize_qk: Divide q and k by their norm first: x * rsqrt(sum x^2 + 1e-6).
        impl: "auto", or a named implementation of `delta_rule`.

    Returns:
        A `[B, HV, T, T*n]` in q's dtype, zero where j is later than i.

    Raises:
        ValueError: An argument has the wrong shape, dtype or device; the message names it.

    Examples:
        >>> import torch
        >>> q, k = torch.randn(2, 1, 6, 1, 4).unbind()
        >>> A = attention_matrix(q, k, beta=torch.rand(1, 6, 1))
        >>> A.shape, bool((A.triu(1) == 0).all())
        (torch.Size([1, 1, 6, 6]), True)

    Source: DeltaNet, arXiv 2406.06484, section 3.2, whose print leaves out the beta_j.
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
