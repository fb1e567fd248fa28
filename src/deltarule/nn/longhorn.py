"""Longhorn, one step size for each head: the exact minimiser of a proximal least-squares step.

S_t = S_{t-1} (I - e_t k_t k_t^T) + e_t v_t k_t^T        e_t = b_t / (1 + b_t |k_t|^2)
b_t = beta_max sigmoid(beta_logits_t)
"""

from deltarule.nn.delta import DeltaMixer
from deltarule.nn.feature_maps import normed
from deltarule.nn.gates import write_strength
from deltarule.nn.rule import Carry, Mapped, Projections, Rule


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """Keys keep their length: the step size makes up for it, and 1 - e |k|^2 is in (0, 1]."""
    strength = write_strength(projections)
    value_heads_per_key_head = projections.v.shape[2] // projections.k.shape[2]
    q, k = (normed(projections, x, otherwise="none") for x in (projections.q, projections.k))
    key_square = k.square().sum(-1)
    key_square = key_square.repeat_interleave(value_heads_per_key_head, dim=2)
    beta = strength / (1 + strength * key_square)
    dtype = projections.v.dtype
    return projections.qkv | {"q": q.to(dtype), "k": k.to(dtype), "beta": beta}, carry


RULE = Rule(
    name="longhorn",
    title="Longhorn (per head)",
    recurrence="S = S (I - e k k^T) + e v k^T",
    decay="none",
    erase="tied",
    objective="|S - S'|^2 + b |S k - v|^2, exactly",
    source="arXiv 2407.14207, theorem 3.1, one b for each head instead of one for each channel",
    arguments=arguments,
)


class Longhorn(DeltaMixer):
    """Longhorn (per head): S = S (I - e k k^T) + e v k^T, e = b / (1 + b |k|^2).

    The released model has one b for each channel and approximates I - e k k^T by its diagonal;
    this is the paper's exact update with one b for each head. e |k|^2 stays below 1 whatever
    beta_max, the largest b.

    Defaults: head_k_dim = head_v_dim = hidden_size / num_heads, convolution of 4, SiLU on q, k and
    v, b in [0, 1], output gate SiLU.

    Examples:
        >>> import torch
        >>> Longhorn(32, num_heads=2)(torch.zeros(1, 5, 32))[0].shape
        torch.Size([1, 5, 32])

    Source: arXiv 2407.14207, theorem 3.1.
    """

    rule = RULE
    maps_features = True
    default_conv_size = 4
    default_output_gate = True
    activates_projections = True
