"""Where the gates start: the distributions that the papers draw A_log and dt_bias from."""

import math

import torch
from torch import Tensor, nn

DT_RANGE = (1e-3, 1e-1)
# A rate of zero would have a logarithm of minus infinity.
SMALLEST = 1e-4


def initial_A_log(heads: int, smallest: float, largest: float) -> Tensor:
    """Natural log of a rate drawn from U(smallest, largest), [HV] in float32."""
    rate = torch.empty(heads, dtype=torch.float32).uniform_(smallest, largest)
    return rate.clamp(min=SMALLEST).log()


def initial_dt_bias(*sizes: int) -> Tensor:
    """b with softplus(b) = dt drawn log-uniformly from [1e-3, 1e-1], in float32."""
    smallest, largest = (math.log(dt) for dt in DT_RANGE)
    dt = torch.empty(sizes, dtype=torch.float32).uniform_(smallest, largest).exp()
    # The inverse of softplus, log(e^dt - 1), without the cancellation for small dt.
    return dt + torch.log(-torch.expm1(-dt))


def low_rank(
    inputs: int, rank: int, outputs: int, *, bias: bool = False, activation: nn.Module | None = None
) -> nn.Sequential:
    """Project through few channels, with an activation on them if any; the bias comes last."""
    down, up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=bias)
    return nn.Sequential(down, up) if activation is None else nn.Sequential(down, activation, up)
