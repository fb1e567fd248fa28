"""An autoencoder around any layer: a row of tokens into one vector, and back.

    e     = encoder(tokens)[T]                        the state of the stream at the last token
    x_t   = decoder(e + p_t)        t = 1, ..., T     p_t: sines and cosines of the position
    decoder(x) = norm(gelu(W_2 norm(gelu(W_1 norm(x)))))

The encoder is a `CausalLM`, whose head reads x_t instead of the stream. Source: the backbone of the
task "compression" of the MAD benchmark (arXiv 2403.17844).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deltarule.models import CausalLM, ModelConfig
from deltarule.nn import ModelState
from deltarule.ops.context import Context
from deltarule.shapes import Hidden, Mask, Offsets
from experiments.task_cell import TaskCell

WAVELENGTHS = 10_000.0


class Autoencoder(CausalLM):
    """A model that says each token again after it has read all; hidden_size is even, 4 or more."""

    def __init__(self, config: ModelConfig) -> None:
        """Build encoder and decoder; their weights come from the global random state."""
        if config.hidden_size < 4 or config.hidden_size % 2:
            raise ValueError(
                f"hidden_size must be even and 4 or more: half of it is for sines, half for "
                f"cosines; got {config.hidden_size}"
            )
        super().__init__(config)
        size = config.hidden_size
        self.decoder = nn.Sequential(
            nn.LayerNorm(size), nn.Linear(size, size), nn.GELU(), nn.LayerNorm(size),
            nn.Linear(size, size), nn.GELU(), nn.LayerNorm(size),
        )  # fmt: skip

    def hidden(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        *,
        cu_seqlens: Offsets | None = None,
        mask: Mask | None = None,
        context: Context | None = None,
    ) -> tuple[Hidden, ModelState]:
        """What the head reads at each position; the arguments are those of `CausalLM.hidden`."""
        x, state = super().hidden(tokens, state, cu_seqlens=cu_seqlens, mask=mask, context=context)
        places = positions(x.shape[1], x.shape[2], x.device)
        return self.decoder(x[:, -1:] + places), state


def positions(length: int, size: int, device: torch.device) -> Tensor:
    """Sines, then cosines of each position, [length, size], from wavelength 2 pi up."""
    steps = torch.arange(size // 2, device=device) / (size // 2 - 1)
    angles = torch.arange(length, device=device)[:, None] * torch.exp(
        -math.log(WAVELENGTHS) * steps
    )
    return torch.cat([angles.sin(), angles.cos()], dim=1)


@dataclass(frozen=True, kw_only=True)
class AutoencoderCell(TaskCell):
    """One small autoencoder on one task, whose labels are the tokens themselves."""

    def build(self) -> CausalLM:
        """The model, its weights drawn from the global random state."""
        return Autoencoder(self.model)
