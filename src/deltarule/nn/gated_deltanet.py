"""Gated DeltaNet as a layer."""

from torch import nn

from deltarule.nn.gates import initial_A_log, initial_dt_bias
from deltarule.nn.mixer import RecurrentMixer
from deltarule.rules import gated_deltanet


class GatedDeltaNet(RecurrentMixer):
    """Gated DeltaNet: S = a S (I - beta k k^T) + beta v k^T with unit keys and queries.

    Defaults: head_k_dim = 3/4 hidden_size / num_heads, head_v_dim = 2 head_k_dim, convolution of
    4, SiLU on q, k and v, beta in [0, 1], output gate SiLU; exp(A_log) from U(0, 16) and
    softplus(dt_bias) log-uniform in [1e-3, 1e-1].

    Example:
        >>> import torch
        >>> layer = GatedDeltaNet(32, num_heads=2)
        >>> y, state = layer(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape, state["q_conv"].shape
        (torch.Size([1, 2, 24, 12]), torch.Size([1, 3, 24]))

    Source: arXiv 2412.06464, section 3.
    """

    rule = gated_deltanet.RULE
    expand_k = 0.75
    expand_v = 2
    default_conv_size = 4
    default_output_gate = True
    activates_projections = True

    def build_gates(self) -> None:
        """Add the decay of each head."""
        super().build_gates()
        self.a_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
        self.gate_parameter("A_log", initial_A_log(self.num_v_heads, 0, 16))
        self.gate_parameter("dt_bias", initial_dt_bias(self.num_v_heads))
