"""The feed-forward half of a block.

y = down(SiLU(gate x) * up x)
"""

import torch.nn.functional as F
from torch import nn

from deltarule.shapes import Hidden


class SwiGLU(nn.Module):
    """A gated feed-forward network without biases.

    Args:
        hidden_size: Channels of the stream.
        mlp_size: Channels inside.

    Example:
        >>> import torch
        >>> SwiGLU(8, 16)(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])

    Source: arXiv 2002.05202, eq. 6.
    """

    def __init__(self, hidden_size: int, mlp_size: int) -> None:
        """Build the three projections."""
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, mlp_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, mlp_size, bias=False)
        self.down_proj = nn.Linear(mlp_size, hidden_size, bias=False)

    def forward(self, x: Hidden) -> Hidden:
        """Map x [B, T, hidden_size] token by token."""
        y: Hidden = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y
