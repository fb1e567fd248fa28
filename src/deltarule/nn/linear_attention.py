"""Linear attention as a layer."""

from deltarule.nn.mixer import RecurrentMixer
from deltarule.rules import linear_attention


class LinearAttention(RecurrentMixer):
    """Linear attention without feature map and normaliser: S += v k^T, then a norm of each head.

    Defaults: head_k_dim = head_v_dim = hidden_size / num_heads, no convolution, no output gate.

    Example:
        >>> import torch
        >>> y, state = LinearAttention(32, num_heads=2)(torch.zeros(1, 5, 32))
        >>> y.shape, state["recurrent"].shape
        (torch.Size([1, 5, 32]), torch.Size([1, 2, 16, 16]))

    Source: arXiv 2006.16236; the norm in place of the normaliser as in arXiv 2210.10340.
    """

    rule = linear_attention.RULE
