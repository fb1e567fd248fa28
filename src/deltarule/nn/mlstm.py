"""mLSTM as a layer."""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from deltarule.nn.call import Call
from deltarule.nn.mixer import RecurrentMixer
from deltarule.nn.norm import GatedGroupNorm
from deltarule.rules import Projections, mlstm


class MLSTM(RecurrentMixer):
    """mLSTM: S = f S + i v k^T, o = S q / max(1, |z^T q|), with exponential input gates i.

    The state also keeps the running maximum (`stabilizer` [N, HV], float32): the matrix is the
    paper's times exp(-stabilizer).

    Defaults: head_k_dim = head_v_dim = hidden_size / num_heads, no convolution, the norm of each
    head's mean and variance, output gate sigmoid; forget biases from 3 to 6 over the heads, input
    biases from N(0, 0.1^2).

    Example:
        >>> import torch
        >>> y, state = MLSTM(32, num_heads=2)(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape, state["stabilizer"].shape
        (torch.Size([1, 2, 17, 16]), torch.Size([1, 2]))

    Source: arXiv 2405.04517, section 2.3 and appendix A.
    """

    rule = mlstm.RULE
    default_output_gate = True
    gate_activation = "sigmoid"
    float32_parameters: ClassVar[tuple[str, ...]] = ("decay_bias", "beta_bias")

    decay_bias: nn.Parameter
    beta_bias: nn.Parameter

    def build_gates(self) -> None:
        """Make the forget and the input gate of each head."""
        super().build_gates()
        heads = self.num_v_heads
        self.a_proj = nn.Linear(self.hidden_size, heads, bias=False)
        self.b_proj = nn.Linear(self.hidden_size, heads, bias=False)
        self.gate_parameter("decay_bias", torch.linspace(3, 6, heads, dtype=torch.float32))
        self.gate_parameter("beta_bias", 0.1 * torch.randn(heads, dtype=torch.float32))

    def build_output(self, gated: bool) -> None:
        """Make the norm of mean and variance."""
        super().build_output(gated)
        sizes = self.num_v_heads, self.head_v_dim
        self.o_norm = GatedGroupNorm(*sizes, self.norm_eps, self.gate_activation)

    def project(self, call: Call) -> Projections:
        """Add the biases of the gates."""
        p = super().project(call)
        decay, beta = p.need("decay_logits"), p.need("beta_logits")
        return replace(p, decay_logits=decay + self.decay_bias, beta_logits=beta + self.beta_bias)
