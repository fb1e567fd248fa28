"""Mamba-1 as a layer."""

from torch import Tensor, nn

from deltarule.nn.gates import initial_dt_bias, low_rank
from deltarule.nn.scan import MambaBlock
from deltarule.rules import Arguments, mamba1


class Mamba1(MambaBlock):
    """Mamba: S = S * exp(-(dt 1^T) * exp(A_log)) + (dt * v) k^T, o = S q + D * v, gated.

    In the paper's letters q = C, k = B, v = x, dt = Delta; all are computed from the convolved x.

    Defaults: 2 hidden_size value channels with a state of 16 each, convolution of 4 (without the
    release's bias), step sizes through hidden_size / 16 channels; exp(A_log) from 1 to 16,
    softplus(dt_bias) log-uniform in [1e-3, 1e-1], D of ones.

    Example:
        >>> import torch
        >>> y, state = Mamba1(32, num_heads=1)(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape
        torch.Size([1, 1, 64, 16])

    Source: arXiv 2312.00752, section 3.4 and algorithm 2.
    """

    rule = mamba1.SYSTEM
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def build_scan(self, inner: int) -> None:
        """Make q, k and the step sizes, all from the values, and the rates."""
        self.q_proj = nn.Linear(inner, self.head_k_dim, bias=False)
        self.k_proj = nn.Linear(inner, self.head_k_dim, bias=False)
        self.a_proj = low_rank(inner, self.step_rank(), inner)
        self.gate_parameter("A_log", self.rates())
        self.gate_parameter("dt_bias", initial_dt_bias(self.num_heads, self.head_v_dim))

    def scan_arguments(self, stream: Tensor, v: Tensor) -> Arguments:
        """By the rule; q and k have one head for all values."""
        return mamba1.arguments(
            self.q_proj(stream).unsqueeze(2), self.k_proj(stream).unsqueeze(2), v,
            step_logits=self.per_head(self.a_proj(stream)), A_log=self.A_log, dt_bias=self.dt_bias,
        )  # fmt: skip
