"""Gated Linear Attention as a layer."""

from deltarule.nn.gates import low_rank
from deltarule.nn.mixer import RecurrentMixer
from deltarule.rules import gla

DECAY_RANK = 16


class GatedLinearAttention(RecurrentMixer):
    """Gated Linear Attention: S = S Diag(a) + v k^T, a = sigmoid(W2 W1 x + b)^(1/16).

    Defaults: head_k_dim = hidden_size / (2 num_heads), head_v_dim = 2 head_k_dim, decay through
    16 channels, no convolution, output gate SiLU.

    Example:
        >>> import torch
        >>> y, state = GatedLinearAttention(32, num_heads=2)(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape
        torch.Size([1, 2, 16, 8])

    Source: arXiv 2312.06635, section 4.4.
    """

    rule = gla.RULE
    expand_k = 0.5
    expand_v = 2
    default_output_gate = True

    def build_gates(self) -> None:
        """Add the decay of each key channel."""
        super().build_gates()
        channels = self.num_v_heads * self.head_k_dim
        self.a_proj = low_rank(self.hidden_size, DECAY_RANK, channels, bias=True)
