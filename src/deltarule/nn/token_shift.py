"""RWKV's token shift: what reads a token reads some of the one before, a share for each channel.

x_t + share * (x_{t-1} - x_t)        first shares 1 - (i / C)^(p (1 - layer / layers))

Its feed-forward half: y_t = W_o max(W_u (x_t + mix * (x_{t-1} - x_t)), 0)^2
"""

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.delta_mixer import DeltaMixer
from deltarule.nn.frame import Frame
from deltarule.nn.gates import float32_parameter
from deltarule.nn.rule import LayerCall

GROUP_NORM_EPS = 64e-5


class ChannelMix(Frame):
    """A network of squared ReLU that reads each token mixed with the one before.

    Source: arXiv 2503.14456, section 4.2.
    """

    float32_parameters = ("shift_mix",)
    convolved = ()
    shifts = True

    def __init__(
        self, hidden_size: int, mlp_size: int, *, layer_index: int = 0, num_layers: int = 1
    ) -> None:
        super().__init__()
        self.hidden_size, self.conv_size = hidden_size, 0
        share = torch.arange(hidden_size, dtype=torch.float32) / hidden_size
        above = 1 - layer_index / num_layers
        self.shift_mix = float32_parameter(1 - share.pow(above**4))
        self.up_proj = nn.Linear(hidden_size, mlp_size, bias=False)
        self.o_proj = nn.Linear(mlp_size, hidden_size, bias=False)

    def memories(self) -> dict[str, tuple[int, ...]]:
        return {}

    def mix(self, call: LayerCall) -> Tensor:
        x = torch.addcmul(call.x, call.token_shift(), self.shift_mix.to(call.x.dtype))
        return self.o_proj(F.relu(self.up_proj(x)).square())


class ShiftedMixer(DeltaMixer):
    """A linear rule of which every projection reads x mixed with the token before."""

    shifts = True
    default_output_gate = True
    centred = True
    fixed_eps = GROUP_NORM_EPS
    options = DeltaMixer.options - {"num_v_heads", "conv_size", "conv_bias", "norm_eps"}
    a_proj: nn.Module

    def gate(self, x: Tensor) -> Tensor | None:
        return None if self.g_proj is None else self.by_head(self.g_proj(x))


def first_shares(
    powers: Iterable[float], channels: int, layer_index: int, num_layers: int
) -> Tensor:
    """Initial shares [powers, channels]; the power p says how fast they fall with channel i."""
    place = torch.arange(channels, dtype=torch.float32) / channels
    above = 1 - layer_index / num_layers
    return torch.stack([1 - place.pow(power * above) for power in powers])


def shifted(call: LayerCall, powers: Mapping[str, float], shares: Tensor) -> dict[str, Tensor]:
    """What each named projection reads, by its own shares [powers, channels]."""
    change = call.token_shift()
    parts = zip(powers, shares.to(call.x.dtype), strict=True)
    return {name: torch.addcmul(call.x, change, share) for name, share in parts}
