"""Least decays that grow with depth: HGRN's forget gates, learned for all layers of a model.

a = lb + (1 - lb) sigmoid(f)        lb of layer l = sum over layers 1..l of softmax(bound_logits)
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.gates import computed
from deltarule.nn.mixer import Mixer

# Below it the decay is a reset, and exp of its negative would overflow.
SMALLEST = -80.0


def bounded(logits: Tensor, bound: Tensor | None) -> tuple[Tensor, Tensor]:
    """log a = log sigmoid(f) + log(1 + lb e^-f), and 1 - a = (1 - lb) sigmoid(-f)."""
    logits = computed(logits).clamp(min=SMALLEST)
    log_decay, rest = F.logsigmoid(logits), torch.sigmoid(-logits)
    if bound is None:
        return log_decay, rest
    log_decay = (log_decay + torch.log1p(bound * torch.exp(-logits))).clamp(max=0)
    return log_decay, (1 - bound) * rest


class LowerBounds(Mixer):
    """A layer whose first of its kind in a model owns the bounds of all, and hands them on."""

    float32_parameters: ClassVar[tuple[str, ...]] = ("bound_logits",)
    # Which of the bounds is this layer's; and the parameter of the one layer that owns them.
    bound_index: int = 0
    bound_logits: nn.Parameter | None

    def bound_sizes(self) -> tuple[int, int]:
        """Heads, and channels of one that have a decay."""
        return self.num_heads, self.head_k_dim

    def find_place(self, layer_types: Sequence[str], layer_index: int) -> None:
        """Count the layers of this kind: the first of several owns the bounds of all."""
        kinds = list(layer_types)
        self.bound_index = kinds[:layer_index].count(self.rule.name)
        if self.bound_index == 0 and (layers := kinds.count(self.rule.name)) > 1:
            sizes = layers, *self.bound_sizes()
            self.gate_parameter("bound_logits", torch.ones(sizes, dtype=torch.float32))

    def build_gates(self) -> None:
        """Leave the bounds to `find_place`: a layer alone has none."""
        super().build_gates()
        self.register_parameter("bound_logits", None)

    def lower_bound(self, shared: dict[str, Tensor]) -> Tensor | None:
        """The sum of softmax(bound_logits) over the layers from the second to this one."""
        name = f"{self.rule.name}_lower_bounds"
        if self.bound_logits is not None:
            share = self.bound_logits.softmax(0)
            shared[name] = share.cumsum(0) - share[0]
        if self.bound_index == 0 or name not in shared:
            return None
        return shared[name][self.bound_index]
