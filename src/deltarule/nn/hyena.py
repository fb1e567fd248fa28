"""Hyena: a filter as long as the memory, between two gates that are projected from the input.

h_j = W_4 sin(w W_3 sin(..W_1 e(j / L))) exp(-j / L rate), rates linear over the filters

is what a small network makes of the lag; nothing in it depends on the input.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule import ops
from deltarule.nn.checks import COMMON, default, positive
from deltarule.nn.gates import float32_parameter
from deltarule.nn.layout import Layout, split
from deltarule.nn.mixer import Mixer
from deltarule.nn.rule import LayerCall, System
from deltarule.nn.state import State
from deltarule.ops.dispatch import without_autocast

# Tokens that a filter reaches where no number is given.
REACH = 2048
# Pairs of cosine and sine in e(t), channels inside the network, and the frequency w at the start.
BANDS, WIDTH, FREQUENCY = 16, 64, 14.0
# Shares of its length after which the fastest and the slowest filter have fallen to LEFT.
FASTEST, SLOWEST = 0.3, 1.5
LEFT = 0.01


class MultiHeadHyena(Mixer):
    """Multi-head Hyena: S = sum_j h_j v_{t-j} k_{t-j}^T, o = S q, with one filter for each head.

    The state holds the last filter_size - 1 keys and values as `recurrent`. Nothing follows the
    convolution, and there is no norm.

    Examples:
        >>> layer = MultiHeadHyena(32, num_heads=2, filter_size=100)
        >>> y, state = layer(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape
        torch.Size([1, 99, 2, 32])
    """

    rule = System(
        name="multi_head_hyena", title="Multi-head Hyena", operator="long_convolution",
        decay="none", erase="none", page="hyena", state_size="HV (L - 1) (K + V)",
        recurrence="S = h_0 v k^T + h_1 v' k'^T + h_2 v'' k''^T + ..",
        read_out="o = S q + d (q . k) v",
        source="arXiv 2310.18780, section 4; filters of arXiv 2302.10866, section 3.3",
        forms="recurrent, halves by FFT",
    )  # fmt: skip
    options = COMMON - {"norm_eps"} | {"filter_size"}
    default_conv_size = 3
    normless = True
    linear_state = False
    float32_parameters = ("filter_1", "filter_2", "filter_3", "filter_4", "frequency", "rate", "D")

    def activates(self, name: str) -> bool:
        return False

    def filters(self) -> tuple[int, int, int]:
        """Filters, and the channels of a key and of a value that each has."""
        return self.num_heads, self.head_k_dim, self.head_v_dim

    def build_gates(self) -> None:
        self.filter_size = positive("filter_size", default(self.filter_size, REACH))
        filters, inner = self.filters()[0], WIDTH + 1
        sizes = (WIDTH, 2 + 2 * BANDS), (WIDTH, inner), (WIDTH, inner), (filters, WIDTH)
        for index, (outputs, inputs) in enumerate(sizes, start=1):
            # As linear layers draw theirs.
            drawn, bound = torch.empty(outputs, inputs, dtype=torch.float32), inputs**-0.5
            drawn.uniform_(-bound, bound)
            self.register_parameter(f"filter_{index}", float32_parameter(drawn))
        self.frequency = float32_parameter(torch.full((WIDTH,), FREQUENCY, dtype=torch.float32))
        fastest, slowest = (-math.log(LEFT) / share for share in (FASTEST, SLOWEST))
        rate = torch.linspace(slowest, fastest, filters, dtype=torch.float32)
        self.rate = float32_parameter(rate)
        self.D = float32_parameter(torch.randn(filters, dtype=torch.float32))

    def memories(self) -> dict[str, tuple[int, ...]]:
        filters, key_size, value_size = self.filters()
        return {"recurrent": (self.filter_size - 1, filters, key_size + value_size)}

    def state_before(self, state: State | None, layout: Layout) -> State:
        """Keep no rows of zeros where nothing came before: a filter would go over them, too."""
        if state is not None:
            return super().state_before(state, layout)
        empty = self.init_state(0)
        none = empty.pop("recurrent")
        rows = {name: x.new_zeros(layout.sequences, *x.shape[1:]) for name, x in empty.items()}
        return State(rows, recurrent=none)

    def taps(self) -> Tensor:
        """[F, L] all filters, the skip with the token itself."""
        # Maps [outputs, inputs + 1], the last column the bias, and one [F, inputs] without.
        *layers, last = (getattr(self, f"filter_{index}") for index in range(1, 5))
        size, rate = self.filter_size, self.rate
        time = torch.arange(size, device=rate.device).to(rate.dtype).unsqueeze(1) / size
        angle = 2 * math.pi * time * torch.arange(BANDS, device=rate.device)
        with without_autocast(rate.device):
            x = torch.cat([time, angle.cos(), angle.sin()], dim=1)
            for layer in layers:
                x = torch.sin(self.frequency * F.linear(x, layer[:, :-1], layer[:, -1]))
            taps = F.linear(x, last).mT * torch.exp(-rate.abs().unsqueeze(1) * time.mT)
        return taps + F.pad(self.D.unsqueeze(1), (0, size - 1))

    def read(self, call: LayerCall) -> Tensor:
        filters, key_size, value_size = self.filters()
        sizes = {"q": key_size, "k": key_size, "v": value_size}
        q, k, v = (split(self.stream(name, call), filters, size) for name, size in sizes.items())
        rows = call.before["recurrent"]
        before = rows if len(rows) else None
        o, state = ops.long_convolution(
            v, self.taps(), q=q, k=k, initial_state=before, **call.layout.ends
        )
        assert state is not None
        call.after["recurrent"] = state
        return self.by_head(o.flatten(-2))


class Hyena(MultiHeadHyena):
    """Hyena of order 2: o = q * (h conv (k * v) + d * k * v), with one filter for each channel.

    Heads are groups of channels and do not change the result.
    """

    rule = replace(
        MultiHeadHyena.rule, name="hyena", title="Hyena", state_size="2 HV (L - 1) V",
        recurrence="s = h_0 * k * v + h_1 * k' * v' + h_2 * k'' * v'' + ..",
        read_out="o = q * (s + d * k * v)",
        source="arXiv 2302.10866, section 3, order 2",
    )  # fmt: skip
    options = MultiHeadHyena.options - {"head_v_dim"}

    def filters(self) -> tuple[int, int, int]:
        return self.num_heads * self.head_k_dim, 1, 1
