"""Longhorn with one step size for each head, as a layer."""

from deltarule.nn.mixer import RecurrentMixer
from deltarule.rules import longhorn


class Longhorn(RecurrentMixer):
    """Longhorn (per head): S = S (I - e k k^T) + e v k^T, e = b / (1 + b |k|^2).

    The released model has one b for each channel and approximates I - e k k^T by its diagonal;
    this is the paper's exact update with one b for each head. e |k|^2 stays below 1 whatever
    beta_max, the largest b.

    Defaults: head_k_dim = head_v_dim = hidden_size / num_heads, convolution of 4, SiLU on q, k and
    v, b in [0, 1], output gate SiLU.

    Example:
        >>> import torch
        >>> Longhorn(32, num_heads=2)(torch.zeros(1, 5, 32))[0].shape
        torch.Size([1, 5, 32])

    Source: arXiv 2407.14207, theorem 3.1.
    """

    rule = longhorn.RULE
    default_conv_size = 4
    default_output_gate = True
    activates_projections = True
