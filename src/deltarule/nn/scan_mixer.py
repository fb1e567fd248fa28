"""What the layers over `selective_scan` share: Mamba's block, and states of one number a channel.

v = SiLU(conv(W_v x))        y = W_o ((scan(v) + D * v) * SiLU(W_g x))
h_t = a_t * h_{t-1} + w_t    one key channel, q = k = 1
"""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from deltarule import ops
from deltarule.nn.checks import COMMON
from deltarule.nn.gates import computed, float32_parameter
from deltarule.nn.layout import silence_padding
from deltarule.nn.mixer import Mixer
from deltarule.nn.rule import Arguments, LayerCall

# The step size comes through hidden_size / 16 channels, as in Mamba's release.
STEP_RANK_SHARE = 16


class ValueMixer(Mixer):
    """A layer that projects x to values alone, which num_heads only groups; there is no norm."""

    options = COMMON - {"norm_eps"}
    convolved: ClassVar[tuple[str, ...]] = ("v",)
    normless = True
    shares_values = True

    def stream_sizes(self) -> dict[str, int]:
        return {"v": self.num_heads * self.head_v_dim}


class ScanMixer(ValueMixer):
    """Mamba's block: values convolved, scanned and added to themselves, then gated.

    All value channels read the same q and k.
    """

    state_size = 16
    expand_v = 2
    default_conv_size = 4
    default_output_gate = True
    float32_parameters: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", "D")

    @abstractmethod
    def build_scan(self, inner: int) -> None:
        """Make what the scan's arguments are computed from."""

    @abstractmethod
    def scan_arguments(self, stream: Tensor, v: Tensor) -> Arguments:
        """Compute the scan's arguments from the values [B, T, inner], and as heads [B, T, H, V]."""

    def build_gates(self) -> None:
        self.build_scan(self.num_heads * self.head_v_dim)
        self.D = float32_parameter(torch.ones(self.num_heads, self.head_v_dim))

    def read(self, call: LayerCall) -> Tensor:
        stream = self.values(call)
        v = self.by_head(stream)
        o = self.scanned(stream, v, call)
        return (o + self.D * v).to(o.dtype)

    def scanned(self, stream: Tensor, v: Tensor, call: LayerCall) -> Tensor:
        """Carry the state along the values [B, T, inner], v the same by heads, and read it."""
        return scan(self.scan_arguments(stream, v), call)

    def arguments(self, call: LayerCall) -> Arguments:
        stream = self.values(call)
        return self.scan_arguments(stream, self.by_head(stream))

    def values(self, call: LayerCall) -> Tensor:
        """SiLU(conv(W_v x)), [B, T, inner]."""
        return self.activated(self.stream("v", call))[0]

    def step_rank(self) -> int:
        """Channels between the values and their step sizes."""
        return -(-self.hidden_size // STEP_RANK_SHARE)

    def rates(self) -> Tensor:
        rate = torch.arange(1, self.head_k_dim + 1, dtype=torch.float32)
        return rate.log().repeat(self.num_heads, self.head_v_dim, 1)


def scan(arguments: Arguments, call: LayerCall) -> Tensor:
    """Silence padding, run `selective_scan` on the state `recurrent`, and keep what it becomes."""
    names = ("v", "delta", "value_log_decay", "log_decay", "beta")
    output = ops.selective_scan(
        **silence_padding(arguments, call.layout.real, names),
        initial_state=call.before["recurrent"],
        **call.layout.spans,
    )
    assert output.final_state is not None
    call.after["recurrent"] = output.final_state
    return output.o


class VectorMixer(ValueMixer):
    """A layer of independent channels, whose state is a vector."""

    options = ValueMixer.options - {"head_k_dim"}
    state_size: ClassVar[int | None] = 1

    def run(self, writes: Tensor, log_decay: Tensor, call: LayerCall) -> Tensor:
        """h [B, T, H, channels], in float32 at least, of writes and logs of the same shape."""
        writes = computed(writes)
        one = torch.ones(*writes.shape[2:], 1, dtype=writes.dtype, device=writes.device)
        decay = log_decay.expand(writes.shape)
        given = {"q": one, "k": one, "v": writes, "value_log_decay": decay, "scale": 1.0}
        return scan(given, call)
