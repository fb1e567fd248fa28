"""HGRN: a vector whose channels turn at rates of their own and forget by gates with a least decay.

With g_t = e^{-i theta (t - 1)} h_t, which only decays, the scan is over real numbers.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.gates import computed, float32_parameter
from deltarule.nn.layout import split
from deltarule.nn.mixer import Mixer
from deltarule.nn.rotation import at_positions, turned
from deltarule.nn.rule import LayerCall, System
from deltarule.nn.scan_mixer import VectorMixer

BASE = 10000.0
# Below it the decay is a reset, and exp of its negative would overflow.
SMALLEST = -80.0


def bounded_decay(logits: Tensor, bound: Tensor | None) -> tuple[Tensor, Tensor]:
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
    # Which of the bounds is this layer's, of `bound_logits` of the one layer that owns them.
    bound_index: int = 0

    def bound_sizes(self) -> tuple[int, int]:
        """Heads, and channels of one that have a decay."""
        return self.num_heads, self.head_k_dim

    def find_place(self, layer_types: Sequence[str], layer_index: int) -> None:
        """Count the layers of this kind: the first of several owns the bounds of all."""
        self.bound_index = layer_types[:layer_index].count(self.rule.name)
        if self.bound_index == 0 and (layers := layer_types.count(self.rule.name)) > 1:
            sizes = layers, *self.bound_sizes()
            self.bound_logits = float32_parameter(torch.ones(sizes, dtype=torch.float32))

    def build_gates(self) -> None:
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


class HGRN(LowerBounds, VectorMixer):
    """HGRN: h = a e^{i theta} h + (1 - a) c, with gates a and complex inputs c.

    a = lb + (1 - lb) sigmoid(a_proj x), c = SiLU(v_proj x). c and h are complex: the first half of
    a head's channels has the real parts. theta is learned for each channel, from 10000^(-2 i / D);
    the least decay lb grows with depth, as in `HGRN2`. The state's `recurrent`
    [N, H, head_v_dim, 1] is e^{-i theta (t - 1)} h after `length` [N] = t tokens. A norm goes over
    all heads together.
    """

    rule = System(
        name="hgrn", title="HGRN", operator="selective_scan", decay="element", erase="none",
        state_size="HV V",
        recurrence="h = a * e^{i theta} * h + (1 - a) * c", read_out="o = (Re h, Im h)",
        source="arXiv 2311.04823, section 3",
    )  # fmt: skip
    options = VectorMixer.options | {"norm_eps"}
    expand_v = 2
    even = ("head_v_dim",)
    default_output_gate = True
    normless, norm_of_all = False, True
    counts = True
    float32_parameters = ("bound_logits", "frequency")

    def bound_sizes(self) -> tuple[int, int]:
        return self.num_heads, self.head_v_dim // 2

    def build_gates(self) -> None:
        super().build_gates()
        heads, channels = self.bound_sizes()
        self.a_proj = nn.Linear(self.hidden_size, heads * channels, bias=False)
        share = torch.arange(heads * channels, dtype=torch.float32) / (heads * channels)
        self.frequency = float32_parameter((BASE ** (-2 * share)).view(heads, channels))

    def read(self, call: LayerCall) -> Tensor:
        heads, channels = self.bound_sizes()
        (c,) = self.activated(split(self.stream("v", call), heads, 2 * channels))
        logits = split(self.a_proj(call.x), heads, channels)
        log_decay, write = bounded_decay(logits, self.lower_bound(call.shared))
        angle = at_positions(call.positions(), self.frequency)
        writes = turned(computed(c) * torch.cat([write] * 2, dim=-1), -angle)
        h = turned(self.run(writes, torch.cat([log_decay] * 2, dim=-1), call), angle)
        return h.to(c.dtype)
