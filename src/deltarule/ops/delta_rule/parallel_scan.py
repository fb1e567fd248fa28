"""DeltaNet by a parallel scan over matrices: a reference form in O(log T) steps.

S_t = S_{t-1} M_t + X_t        M_t = Diag(a_t) (I - beta_t k_t k_t^T)   X_t = beta_t v_t k_t^T
(M, X) then (M', X') = (M M', X M' + X')        associative, not commutative

It keeps a K x K and a V x K matrix for every token and multiplies them log2 T times, which is why
chunks are faster; it has no chunks, no inverse and no loop over tokens.
"""

import torch

from deltarule.shapes import Beta, Decay, Keys, Queries, RecurrentOutput, State, Values


def parallel_scan(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    beta: Beta,
    log_decay: Decay | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
) -> RecurrentOutput:
    r"""Compute what `delta_rule` with n_steps = 1 does, by composing the tokens' transitions.

    Args:
        q: Queries [B, T, H, K], in float32 or float64.
        k: Keys [B, T, H, K].
        v: Values [B, T, HV, V]; HV is a multiple of H.
        beta: Write strength [B, T, HV].
        log_decay: As in `delta_rule`. None means no decay.
        scale: Factor of the read-out. None means K ** -0.5.
        initial_state: [B, HV, V, K]. None means zeros.

    Returns:
        o [B, T, HV, V] and the last state [B, HV, V, K].

    Examples:
        >>> from deltarule import delta_rule
        >>> q, k, v = torch.randn(3, 1, 9, 2, 4, dtype=torch.float64).unbind()
        >>> beta = torch.rand(1, 9, 2, dtype=torch.float64)
        >>> found = parallel_scan(q, k / 2, v, beta=beta).o
        >>> torch.allclose(found, delta_rule(q, k / 2, v, beta=beta).o)
        True

    Source: arXiv 2406.06484, footnote 1 and section 5.1.
    """
    heads, key_size = v.shape[2], q.shape[3]
    # [B, HV, T, ..], value head h with key head h * H // HV.
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2) for x in (q, k))
    written = (beta.unsqueeze(-1) * v).transpose(1, 2).unsqueeze(-1) * k.unsqueeze(-2)
    strength = beta.transpose(1, 2)[..., None, None]
    identity = torch.eye(key_size, dtype=k.dtype, device=k.device)
    moved = identity - strength * k.unsqueeze(-1) * k.unsqueeze(-2)
    if log_decay is not None:
        shape = (*v.shape[:3], -1)
        decay = log_decay.expand(v.shape[:3]) if log_decay.ndim < 4 else log_decay
        moved = decay.exp().reshape(shape).transpose(1, 2).unsqueeze(-1) * moved
    distance = 1
    while distance < q.shape[2]:
        later = moved[:, :, distance:]
        added = written[:, :, :-distance] @ later + written[:, :, distance:]
        written = torch.cat([written[:, :, :distance], added], dim=2)
        moved = torch.cat([moved[:, :, :distance], moved[:, :, :-distance] @ later], dim=2)
        distance *= 2
    states = written
    if initial_state is not None:
        states = initial_state.unsqueeze(2) @ moved + written
    o = (states @ q.unsqueeze(-1)).squeeze(-1).transpose(1, 2)
    return RecurrentOutput(o * (key_size**-0.5 if scale is None else scale), states[:, :, -1])
