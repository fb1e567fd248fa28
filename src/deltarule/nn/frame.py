"""The outer half of every recurrent layer that is no linear rule: tokens laid out, state kept."""

from abc import abstractmethod
from typing import Self

import torch
from torch import Tensor, nn

from deltarule.nn.arguments import check_input, check_state, positive
from deltarule.nn.call import Call
from deltarule.nn.interface import Mixer, MixerConfig
from deltarule.nn.layout import make_layout
from deltarule.nn.rule import Arguments
from deltarule.nn.short_conv import ShortConv
from deltarule.nn.state import State
from deltarule.ops.context import Context
from deltarule.shapes import Hidden, Mask, Offsets


class FramedMixer(Mixer):
    """A recurrent layer that says itself how it mixes the laid-out tokens of a call.

    A subclass sets hidden_size, o_proj, conv_size and conv_channels (stream to channels), and has
    a constructor with the arguments that `from_config` gives.
    """

    hidden_size: int
    conv_size: int
    conv_channels: dict[str, int]
    o_proj: nn.Linear

    @classmethod
    def from_config(cls, config: MixerConfig, layer_index: int) -> Self:
        """Build the layer of a model; options that it lacks are left out."""
        return cls(
            config.hidden_size,
            num_heads=config.num_heads,
            head_k_dim=config.head_k_dim,
            head_v_dim=config.head_v_dim,
            conv_size=config.conv_size,
            output_gate=config.output_gate,
            norm_eps=config.norm_eps,
        )

    @abstractmethod
    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int | None = None,
        output_gate: bool | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        """Build the layer."""
        super().__init__()

    @abstractmethod
    def memories(self) -> dict[str, tuple[int, ...]]:
        """Name the recurrent states, with the sizes of one sequence's."""

    def exact(self) -> tuple[str, ...]:
        """Names of what sums over all tokens, and is never in 16 bits."""
        return tuple(self.memories())

    @abstractmethod
    def mix(self, call: Call) -> Tensor:
        """Mix call.x, whose real tokens are in front; fill call.after."""

    def forward(
        self,
        x: Hidden,
        state: State | None = None,
        *,
        cu_seqlens: Offsets | None = None,
        mask: Mask | None = None,
        shared: dict[str, Tensor] | None = None,
        context: Context | None = None,
    ) -> tuple[Hidden, State]:
        """Mix the tokens of x with what came before; arguments as in `RecurrentMixer.forward`."""
        layout = make_layout(x, cu_seqlens, mask, self.check_context(context))
        check_input(x, self.hidden_size, self.o_proj.weight)
        before = self.init_state(layout.sequences) if state is None else state
        before = check_state(before, self.init_state(0), layout.sequences, self.exact())
        shared = {} if shared is None else shared
        call = Call(layout.to_front(x), layout, before, State(), shared)
        return layout.to_place(self.mix(call)), call.after

    def init_state(self, batch_size: int) -> State:
        """Return zeros: the memories in float32, and the convolutions' last inputs."""
        weight = self.o_proj.weight
        dtype = torch.promote_types(torch.float32, weight.dtype)
        state = State()
        for name, sizes in self.memories().items():
            state[name] = torch.zeros(batch_size, *sizes, dtype=dtype, device=weight.device)
        for name in self.conv_channels if self.conv_size else ():
            state[f"{name}_conv"] = getattr(self, f"{name}_conv").init_history(batch_size)
        return state

    def build_convolutions(self, conv_size: int, channels: dict[str, int]) -> None:
        """Make a short convolution for each named stream; a size of 0 makes none."""
        self.conv_size = positive("conv_size", conv_size) if conv_size != 0 else 0
        self.conv_channels = channels
        for name, size in channels.items() if conv_size else ():
            setattr(self, f"{name}_conv", ShortConv(size, conv_size))

    def convolve(self, name: str, y: Tensor, call: Call) -> Tensor:
        """Convolve a stream and keep its history; without a convolution the stream as it is."""
        if not self.conv_size:
            return y
        key = f"{name}_conv"
        history = call.layout.history(y, call.before[key])
        y, call.after[key] = getattr(self, key)(y, history, call.layout)
        return y


def silence_padding(arguments: Arguments, real: Tensor | None, names: tuple[str, ...]) -> Arguments:
    """Put zeros at padding into the named arguments [B, T, ...]: no write, no erase, no decay."""
    if real is None:
        return arguments
    silent = dict(arguments)
    for name in names:
        if isinstance(x := arguments.get(name), Tensor):
            silent[name] = x.masked_fill(~real[(...,) + (None,) * (x.ndim - 2)], 0)
    return silent
