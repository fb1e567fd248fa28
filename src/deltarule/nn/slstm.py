"""sLSTM: a decayed mean for each channel, with gates that see what the head put out last."""

import torch
from torch import Tensor, nn

from deltarule import ops
from deltarule.nn.checks import COMMON
from deltarule.nn.gates import float32_parameter
from deltarule.nn.mixer import Mixer
from deltarule.nn.rule import LayerCall, System

# Biases of the forget gates at the start, from the first channel of a head to its last.
FORGET_BIASES = 3.0, 6.0
GATES = "i", "f", "v", "r"


class SLSTM(Mixer):
    """sLSTM: h = sigmoid(o) * c / n, a mean of tanh(z) that fades, with gates of x and the last h.

    The gates i and f come from the convolved x, z and o from x itself (`v_proj`, `r_proj`). Each
    head has recurrent weights [4, V, V] of its own. The state `recurrent` is h, c, n and m, c and n
    times exp(-m). The convolution comes before i and f, and the norm is of each head's mean and
    variance. Forget biases start from 3 to 6 over the channels, recurrent weights at zero.
    """

    rule = System(
        name="slstm", title="sLSTM", operator="slstm", decay="channel", erase="none",
        state_size="4 HV V",
        recurrence="c = f * c + e^i * tanh(z), n = f * n + e^i, each gate of x and h'",
        read_out="h = sigmoid(o) * c / n",
        source="arXiv 2405.04517, section 2.2, eq. 8 to 17 with sigmoid forget gates, and its code",
        forms="recurrent, side by side, GPU kernel",
    )  # fmt: skip
    options = COMMON - {"head_v_dim"}
    default_conv_size = 4
    convolved = ("x",)
    linear_state = False
    centred = True
    float32_parameters = ("gate_bias",)
    roles = {"i_proj": "gate", "f_proj": "gate", "recurrent": "gate"}

    def build_projections(self) -> None:
        for name in GATES:
            self.build_projection(name, self.num_heads * self.head_v_dim)
        self.build_convolution("x", self.hidden_size)

    def build_gates(self) -> None:
        heads, size = self.num_heads, self.head_v_dim
        bias = torch.zeros(heads, 4, size, dtype=torch.float32)
        bias[:, 1] = torch.linspace(*FORGET_BIASES, size)
        self.gate_bias = float32_parameter(bias)
        self.recurrent = nn.Parameter(torch.zeros(heads, 4, size, size))

    def memories(self) -> dict[str, tuple[int, ...]]:
        return {"recurrent": (self.num_heads, 4, self.head_v_dim)}

    def read(self, call: LayerCall) -> Tensor:
        layout, x = call.layout, call.x
        if self.conv_size:
            x, call.after["x_conv"] = self.x_conv(x, call.before["x_conv"], layout)
        given = [getattr(self, f"{name}_proj")(x if name in "if" else call.x) for name in GATES]
        gates = torch.stack([self.by_head(y) for y in given], dim=3)
        gates = gates + self.gate_bias.to(gates.dtype)
        o, state = ops.slstm(
            gates, self.recurrent, initial_state=call.before["recurrent"], **layout.ends
        )
        assert state is not None
        call.after["recurrent"] = state
        return o
