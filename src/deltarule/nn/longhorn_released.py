"""Longhorn as its authors released it: a diagonal approximation in Mamba's block."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from deltarule.nn.gates import low_rank
from deltarule.nn.scan import MambaBlock
from deltarule.rules import Arguments, longhorn_released


class LonghornReleased(MambaBlock):
    """Longhorn: S = S * (1 - e (k * k)^T) + (e * v) k^T, o = S q + D * v, gated.

    e = b / (1 + b |k|^2) with one b for each value channel. The exact update of `Longhorn` is a
    product with I - e k k^T; here each entry of the state erases only what it holds itself.

    Defaults: as `Mamba1`, but for A_log, which there is none of, and a dt_bias of zeros.

    Example:
        >>> import torch
        >>> y, state = LonghornReleased(32, num_heads=1)(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape
        torch.Size([1, 1, 64, 16])

    Source: arXiv 2407.14207, section 3.2 and algorithm 1.
    """

    rule = longhorn_released.SYSTEM
    float32_parameters: ClassVar[tuple[str, ...]] = ("dt_bias", "D")
    dt_bias: nn.Parameter

    def build_scan(self, inner: int) -> None:
        """Make q, k and the write strengths, all from the values."""
        self.q_proj = nn.Linear(inner, self.head_k_dim, bias=False)
        self.k_proj = nn.Linear(inner, self.head_k_dim, bias=False)
        self.b_proj = low_rank(inner, self.step_rank(), inner)
        self.gate_parameter("dt_bias", torch.zeros(self.num_heads, self.head_v_dim))

    def scan_arguments(self, stream: Tensor, v: Tensor) -> Arguments:
        """By the rule; q and k have one head for all values."""
        return longhorn_released.arguments(
            self.q_proj(stream).unsqueeze(2), self.k_proj(stream).unsqueeze(2), v,
            beta_logits=self.per_head(self.b_proj(stream)), dt_bias=self.dt_bias,
        )  # fmt: skip
