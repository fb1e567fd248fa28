"""Decaying numbers that nothing of the input steers, as one long filter: S4's convolution mode.

h_t = a * h_{t-1} + b v_t, o_t = c . h_t        o_t = sum_j (c . (b a^j)) v_{t-j} + c . (a^{t+1} h)

Powers of a come as products of those of the first tokens and those of every block of tokens.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.ops import long_convolution

# Tokens of a block, whose powers of a are one matrix of each filter.
BLOCK = 256


class Exponentials(NamedTuple):
    """log a, b and c of F channels with K numbers each, all [F, K] and constant."""

    log_factor: Tensor
    b: Tensor
    c: Tensor

    def blocks(self, tokens: int) -> Tensor:
        """a to the first token of each block, [F, M, K]."""
        place = torch.arange(0, tokens, BLOCK, device=self.b.device)
        return torch.exp(self.log_factor.unsqueeze(-2) * place.unsqueeze(-1))

    def inside(self) -> Tensor:
        """a to each place in a block, [F, K, BLOCK]."""
        return torch.exp(self.log_factor.unsqueeze(-1) * torch.arange(BLOCK, device=self.b.device))

    def read(self, weights: Tensor, tokens: int) -> Tensor:
        """The sum of the weights [.., F, K] times a^0, a^1, ..: [.., F, tokens]."""
        found = (weights.unsqueeze(-2) * self.blocks(tokens)) @ self.inside()
        return found.flatten(-2)[..., :tokens]

    def last(self, v: Tensor, before: Tensor) -> Tensor:
        """The state [B, F, K] after the values [B, F, T], from the one before."""
        tokens = v.shape[-1]
        back = F.pad(v.flip(-1), (0, -tokens % BLOCK)).unflatten(-1, (-1, BLOCK))
        summed = (back @ self.inside().mT * self.blocks(tokens)).sum(-2)
        return torch.exp(self.log_factor * tokens) * before + self.b * summed


def convolved(v: Tensor, given: Exponentials, before: Tensor) -> tuple[Tensor, Tensor]:
    """o [B, T, F] and the state [B, F, K] after values [B, T, F], in the dtype of the state."""
    wide, tokens = v.to(before.dtype), v.shape[1]
    taps = given.read(given.b * given.c, tokens)
    o = long_convolution(wide.unsqueeze(-1), taps, return_state=False).o.squeeze(-1)
    carried = given.read(torch.exp(given.log_factor) * given.c * before, tokens)
    return o + carried.mT, given.last(wide.mT, before)
