"""RWKV's token shift: what reads a token reads some of the one before, a share for each channel.

x_t + share * (x_{t-1} - x_t)        first shares 1 - (i / C)^(p (1 - layer / layers))
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from deltarule.nn.call import LayerCall


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
