"""A block of the language model: a mixer and an MLP, each with its norm and its residual."""

import math
from functools import partial

from torch import Tensor, nn

from deltarule.models.config import ModelConfig
from deltarule.nn import MIXERS, RMSNorm, State, SwiGLU
from deltarule.nn.recomputed import recomputed
from deltarule.ops.context import Context
from deltarule.shapes import Hidden, Mask, Offsets


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)), if any; the next norm makes the last sum.

    With the mixer of `post_norm` x + norm(mixer(x)), then x + norm(mlp(x)).
    """

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        """Build the block at layer_index, counted from 0."""
        super().__init__()
        name = config.layer_types[layer_index]
        self.post_norm = name == config.post_norm
        self.mixer_norm = stream_norm(config)
        self.mixer = MIXERS[name].from_config(config, layer_index)
        self.mlp_norm: RMSNorm | None = None
        self.mlp: SwiGLU | None = None
        if size := mlp_size(config):
            self.mlp_norm = stream_norm(config)
            self.mlp = SwiGLU(config.hidden_size, size)

    def forward(
        self,
        x: Hidden,
        branch: Hidden | None,
        state: State | None,
        cu_seqlens: Offsets | None,
        mask: Mask | None,
        shared: dict[str, Tensor],
        context: Context | None = None,
    ) -> tuple[Hidden, Hidden, State]:
        """Add the branch and apply both halves; return stream, branch and the mixer's state."""
        mix = partial(self.mixer, cu_seqlens=cu_seqlens, mask=mask, shared=shared, context=context)
        if self.post_norm:
            x = x if branch is None else x + branch
            y, state = mix(x, state)
            return *self._normed_after(x, y), state
        x, normed = norm_of_sum(self.mixer_norm, x, branch)
        with recomputed(normed, partial(self.mixer_norm.forward, x)):
            y, state = mix(normed, state)
        if self.mlp is None or self.mlp_norm is None:
            return x, y, state
        x, normed = self.mlp_norm.of_sum(x, y)
        with recomputed(normed, partial(self.mlp_norm.forward, x)):
            return x, self.mlp(normed), state

    def _normed_after(self, x: Hidden, y: Hidden) -> tuple[Hidden, Hidden]:
        """Add what the mixer put out to the stream, and apply the MLP; both are normed after."""
        y = self.mixer_norm(y)
        if self.mlp is None or self.mlp_norm is None:
            return x, y
        x = x + y
        return x, self.mlp_norm(self.mlp(x))


def stream_norm(config: ModelConfig) -> RMSNorm:
    """Make a norm of the residual stream."""
    zero_centered = config.zero_centered_norm
    return RMSNorm(config.hidden_size, eps=config.norm_eps, zero_centered=zero_centered)


def norm_of_sum(norm: RMSNorm, x: Hidden, branch: Hidden | None) -> tuple[Hidden, Hidden]:
    """The stream with the branch, if any, and its norm."""
    return (x, norm(x)) if branch is None else norm.of_sum(x, branch)


def mlp_size(config: ModelConfig) -> int:
    """Return the channels inside the MLP: as given, or 8/3 of the stream, in multiples of 16."""
    if config.mlp_size is not None:
        return config.mlp_size
    return 16 * math.ceil(config.hidden_size * 8 / 3 / 16)
