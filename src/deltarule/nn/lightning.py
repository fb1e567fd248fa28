"""Lightning Attention as a layer."""

from deltarule.nn.mixer import RecurrentMixer
from deltarule.rules import lightning


class Lightning(RecurrentMixer):
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

    rule = lightning.RULE
    default_output_gate = True
    gate_activation = "sigmoid"
    activates_projections = True
