"""What the layers share whose state is a network with learned starting weights."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from deltarule.nn.checks import COMMON
from deltarule.nn.gates import computed
from deltarule.nn.mixer import Mixer
from deltarule.nn.rule import LayerCall
from deltarule.nn.state import State


class MemoryMixer(Mixer):
    """A layer whose state is the maps of a network, and sums of their gradients.

    The state's names are those of `parts` for the first map, and the same with _2 for the second;
    the parameters `starts` are the maps before the first token.
    """

    options = COMMON | {"mini_batch"}
    default_conv_size = 4
    linear_state = False
    roles = {"starts": "start"}
    # What the state calls the maps, the sums of their gradients, and what else it keeps of each.
    parts: ClassVar[tuple[str, ...]]

    @abstractmethod
    def map_sizes(self) -> list[tuple[int, int]]:
        """Outputs and inputs of each map of a head."""

    @abstractmethod
    def first_map(self, outputs: int, inputs: int) -> Tensor:
        """Draw a map before the first token, [num_heads, outputs, inputs]."""

    def build_gates(self) -> None:
        self.starts = nn.ParameterList(
            nn.Parameter(self.first_map(*sizes)) for sizes in self.map_sizes()
        )

    def memories(self) -> dict[str, tuple[int, ...]]:
        return {
            name: (self.num_heads, *sizes)
            for name, sizes in zip(self.names(self.parts[1]), self.map_sizes(), strict=True)
        }

    def exact(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in self.names(part))

    def init_state(self, batch_size: int) -> State:
        """Return the learned maps, no gradients, and an empty mini-batch."""
        state = super().init_state(batch_size)
        for name, start in zip(self.names("recurrent"), self.starts, strict=True):
            state[name] = computed(start).expand(batch_size, *start.shape).clone()
        position = torch.zeros(batch_size, dtype=torch.int64, device=self.reference().device)
        return State(state, position=position)

    def names(self, part: str) -> list[str]:
        """What the state calls a part of each map."""
        maps = range(len(self.map_sizes()))
        return [part if index == 0 else f"{part}_{index + 1}" for index in maps]

    def held(self, part: str, call: LayerCall) -> tuple[Tensor, ...]:
        return tuple(call.before[name] for name in self.names(part))

    def keep(self, parts: tuple[tuple[Tensor, ...], ...], call: LayerCall) -> None:
        for part, tensors in zip(self.parts, parts, strict=True):
            call.after.update(zip(self.names(part), tensors, strict=True))
