"""Gated random feature attention as a layer."""

from torch import nn

from deltarule.nn.mixer import RecurrentMixer
from deltarule.rules import gated_rfa


class GatedRFA(RecurrentMixer):
    """Gated RFA: S = g S + (1 - g) v phi(k)^T, divided by the same sum of phi(k).

    Defaults: head_k_dim = head_v_dim = hidden_size / num_heads, random Fourier features of unit
    queries and keys (2 head_k_dim of them, the width of the kernel learned), no convolution, no
    output gate, and no norm: the read-out is a weighted sum of values already.

    Example:
        >>> import torch
        >>> y, state = GatedRFA(32, num_heads=2)(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape
        torch.Size([1, 2, 17, 32])

    Source: arXiv 2103.02143, section 3.
    """

    rule = gated_rfa.RULE
    maps_features = True
    default_feature_map = "random_fourier"

    def build_gates(self) -> None:
        """Add the gate of each head."""
        super().build_gates()
        self.a_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
