"""HGRN: a vector whose channels turn at rates of their own and forget by gates with a least decay.

h_t = a_t e^{i theta} h_{t-1} + (1 - a_t) c_t        o_t = (Re h_t, Im h_t)
a_t = lb + (1 - lb) sigmoid(f_t)

With g_t = e^{-i theta (t - 1)} h_t, which only decays, the scan is over real numbers.
"""

import torch
from torch import Tensor, nn

from deltarule.nn.arguments import check_even
from deltarule.nn.call import Call
from deltarule.nn.gates import computed
from deltarule.nn.layout import split
from deltarule.nn.lower_bounds import LowerBounds, bounded
from deltarule.nn.rule import System
from deltarule.nn.turning import at_positions, turned
from deltarule.nn.vector import VectorMixer

SYSTEM = System(
    name="hgrn",
    title="HGRN",
    operator="selective_scan",
    recurrence="h = a * e^{i theta} * h + (1 - a) * c",
    read_out="o = (Re h, Im h)",
    decay="element",
    erase="none",
    source="arXiv 2311.04823, section 3",
    state_size="HV V",
)
BASE = 10000.0


class HGRN(LowerBounds, VectorMixer):
    """HGRN: h = a e^{i theta} h + (1 - a) c, with gates a and complex inputs c.

    a = lb + (1 - lb) sigmoid(a_proj x), c = SiLU(v_proj x). c and h are complex: the first half of
    a head's channels has the real parts. theta is learned for each channel, from
    10000^(-2 i / D); the least decay lb grows with depth, as in `HGRN2`. The state's `recurrent`
    [N, H, head_v_dim, 1] is e^{-i theta (t - 1)} h after `length` [N] = t tokens.

    Defaults: head_v_dim = 2 hidden_size / num_heads, half of them real parts; no convolution; a
    norm over all heads together; output gate SiLU.

    Examples:
        >>> import torch
        >>> y, state = HGRN(32, num_heads=2)(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape, state["length"]
        (torch.Size([1, 2, 32, 1]), tensor([5]))

    Source: arXiv 2311.04823, section 3.
    """

    rule = SYSTEM
    options = VectorMixer.options | {"norm_eps"}
    expand_v = 2
    default_output_gate = True
    normless, norm_of_all = False, True
    counts = True
    float32_parameters = ("bound_logits", "frequency")
    frequency: nn.Parameter

    def check_options(self) -> None:
        check_even("head_v_dim", self.head_v_dim)

    def bound_sizes(self) -> tuple[int, int]:
        return self.num_heads, self.head_v_dim // 2

    def build_gates(self) -> None:
        super().build_gates()
        heads, channels = self.bound_sizes()
        self.a_proj = nn.Linear(self.hidden_size, heads * channels, bias=False)
        share = torch.arange(heads * channels, dtype=torch.float32) / (heads * channels)
        self.gate_parameter("frequency", (BASE ** (-2 * share)).view(heads, channels))

    def read(self, call: Call) -> Tensor:
        heads, channels = self.bound_sizes()
        (c,) = self.activated(split(self.stream("v", call), heads, 2 * channels))
        logits = split(self.a_proj(call.x), heads, channels)
        log_decay, write = bounded(logits, self.lower_bound(call.shared))
        angle = at_positions(call.positions(), self.frequency)
        writes = turned(computed(c) * torch.cat([write] * 2, dim=-1), -angle)
        h = turned(self.run(writes, torch.cat([log_decay] * 2, dim=-1), call), angle)
        return h.to(c.dtype)
