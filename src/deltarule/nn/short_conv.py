"""A short causal convolution over time, one filter for each channel, then SiLU.

y_t = SiLU(sum_{j=0..W-1} weight_j * x_{t-W+1+j})
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.layout import Layout


class ShortConv(nn.Module):
    """Depthwise causal convolution without bias, followed by SiLU.

    Args:
        channels: Channels D, each with its own filter.
        size: Taps W, at least 1; the last weighs the token itself.
    """

    def __init__(self, channels: int, size: int = 4) -> None:
        """Draw the taps from U(-W^-1/2, W^-1/2)."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, size).uniform_(-(size**-0.5), size**-0.5))

    @property
    def reach(self) -> int:
        """R = W - 1: the earlier inputs that a token sees."""
        return self.weight.shape[1] - 1

    def init_history(self, sequences: int) -> Tensor:
        """Zeros [N, R, D]: what comes before a sequence's first token."""
        return self.weight.new_zeros(sequences, self.reach, self.weight.shape[0])

    def forward(self, x: Tensor, history: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Convolve x [B, T, D] after history [N, R, D]; return y and the next history."""
        extended = layout.with_history(x, history)
        y = convolve(extended, self.weight.to(x.dtype))
        y = F.silu(layout.without_history(y, self.reach))
        return y, layout.next_history(extended, self.reach)


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """[B, W - 1 + T, D], [D, W] -> [B, T, D].

    Shifted multiply-adds: no transpose to the channels-first layout of conv1d, which costs more
    than the arithmetic saves for a few taps.
    """
    taps = weight.unbind(1)
    tokens = x.shape[1] - len(taps) + 1
    y = x[:, :tokens] * taps[0]
    for shift, tap in enumerate(taps[1:], start=1):
        y = torch.addcmul(y, x[:, shift : shift + tokens], tap)
    return y
