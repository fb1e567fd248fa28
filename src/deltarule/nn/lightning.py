"""Lightning Attention: constant decays that grow weaker with depth.

S_t = g_h S_{t-1} + v_t k_t^T        log g_h = -(8 / HV) (1 - layer / layers) h, h = 0..HV-1
"""

import torch

from deltarule.nn.delta import DeltaMixer
from deltarule.nn.rule import Carry, Mapped, Projections, Rule


def arguments(projections: Projections, carry: Carry | None = None) -> Mapped:
    """Head 0 never forgets."""
    heads = projections.v.shape[2]
    dtype = torch.promote_types(projections.v.dtype, torch.float32)
    head = torch.arange(heads, dtype=dtype, device=projections.v.device)
    log_decay = -(8 / heads) * (1 - projections.depth) * head
    return projections.qkv | {"beta": None, "log_decay": log_decay}, carry


RULE = Rule(
    name="lightning",
    title="Lightning Attention",
    operator="delta_rule",
    recurrence="S = g_h S + v k^T",
    read_out="o = S q",
    decay="constant",
    erase="none",
    objective="|S - g S'|^2 - 2 <S k, v>",
    source="arXiv 2401.04658, section 3; slopes of TransNormerLLM, arXiv 2307.14995",
    arguments=arguments,
)


class Lightning(DeltaMixer):
    """Lightning Attention: S = g_h S + v k^T, the deeper the layer the slower the decay.

    log g_h = -(8 / HV) (1 - layer_index / num_layers) h, so give both; a layer on its own is the
    first of one.

    Defaults: head_k_dim = head_v_dim = hidden_size / num_heads, SiLU on q, k and v, no
    convolution, output gate sigmoid, norm of each head (MiniMax-01 norms all heads together).

    Example:
        >>> import torch
        >>> layer = Lightning(32, num_heads=2, layer_index=3, num_layers=12)
        >>> layer(torch.zeros(1, 5, 32))[0].shape
        torch.Size([1, 5, 32])

    Source: arXiv 2401.04658; slopes of arXiv 2307.14995; activation and gate of arXiv 2501.08313.
    """

    rule = RULE
    reads_depth = True
    default_output_gate = True
    gate_activation = "sigmoid"
    activates_projections = True
