"""Layers over `selective_scan`, and the block that three of them share."""

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule import ops
from deltarule.nn.arguments import above_zero, default, default_head_dim, positive
from deltarule.nn.call import Call
from deltarule.nn.frame import FramedMixer, silence_padding
from deltarule.nn.heads import split
from deltarule.nn.rule import Arguments

EXPANSION = 2
STATE_SIZE = 16
# The step size comes through hidden_size / 16 channels, as in Mamba's release.
STEP_RANK_SHARE = 16


class ScanMixer(FramedMixer):
    """A layer whose state [num_heads, head_v_dim, head_k_dim] goes through `selective_scan`."""

    num_heads: int
    head_k_dim: int
    head_v_dim: int

    def memories(self) -> dict[str, tuple[int, ...]]:
        """One matrix state."""
        return {"recurrent": (self.num_heads, self.head_v_dim, self.head_k_dim)}

    @abstractmethod
    def arguments(self, call: Call) -> Arguments:
        """Project to all that `selective_scan` takes but the state."""

    def scan(self, arguments: Arguments, call: Call) -> Tensor:
        """Blank the padding, run the operator, keep its state."""
        names = ("v", "delta", "value_log_decay", "log_decay", "beta")
        output = ops.selective_scan(
            **silence_padding(arguments, call.layout.real, names),
            initial_state=call.before["recurrent"],
            **call.layout.spans,
        )
        assert output.final_state is not None
        call.after["recurrent"] = output.final_state
        return output.o


class MambaBlock(ScanMixer):
    """Mamba's block: values convolved, scanned and added to themselves, then gated.

    v = SiLU(conv(W_v x))        y = W_o ((scan(v) + D * v) * SiLU(W_g x))

    Args:
        hidden_size: Channels of x.
        num_heads: Groups that the value channels are kept in; all read the same q and k, so that
            it changes the state's shape and nothing else.
        head_k_dim: Numbers K kept for each value channel. None: 16.
        head_v_dim: Value channels in a group. None: 2 hidden_size / num_heads.
        conv_size: Taps of the convolution of the values; 0 removes it. None: 4.
        output_gate: Whether to gate the output. None: True.
        norm_eps: Not used: the block has no norm.

    Raises:
        ValueError: A size is out of range.
    """

    float32_parameters: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", "D")
    D: nn.Parameter

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
        """Build the projections around the scan, and by `build_scan` those of the scan."""
        super().__init__(hidden_size, num_heads=num_heads)
        self.hidden_size = positive("hidden_size", hidden_size)
        self.num_heads = positive("num_heads", num_heads)
        self.head_k_dim = positive("head_k_dim", default(head_k_dim, STATE_SIZE))
        if head_v_dim is None:
            sizes = hidden_size, "num_heads", num_heads
            head_v_dim = default_head_dim("head_v_dim", EXPANSION, *sizes)
        self.head_v_dim = positive("head_v_dim", head_v_dim)
        above_zero("norm_eps", norm_eps)
        inner = self.num_heads * self.head_v_dim
        self.v_proj = nn.Linear(hidden_size, inner, bias=False)
        self.build_convolutions(default(conv_size, 4), {"v": inner})
        self.build_scan(inner)
        self.gate_parameter("D", torch.ones(self.num_heads, self.head_v_dim))
        gated = default(output_gate, True)
        self.g_proj = nn.Linear(hidden_size, inner, bias=False) if gated else None
        self.o_proj = nn.Linear(inner, hidden_size, bias=False)

    @abstractmethod
    def build_scan(self, inner: int) -> None:
        """Make what the scan's arguments are computed from."""

    @abstractmethod
    def scan_arguments(self, stream: Tensor, v: Tensor) -> Arguments:
        """Compute the scan's arguments from the values [B, T, inner], and as heads [B, T, H, V]."""

    def arguments(self, call: Call) -> Arguments:
        """Those of the convolved values."""
        stream = self.values(call)
        return self.scan_arguments(stream, self.per_head(stream))

    def values(self, call: Call) -> Tensor:
        """SiLU(conv(W_v x)), [B, T, inner]."""
        stream = self.convolve("v", self.v_proj(call.x), call)
        return stream if self.conv_size else F.silu(stream)

    def mix(self, call: Call) -> Tensor:
        """Convolve, scan, skip, gate."""
        stream = self.values(call)
        v = self.per_head(stream)
        o = self.scan(self.scan_arguments(stream, v), call)
        o = (o + self.D * v).to(o.dtype).flatten(-2)
        if self.g_proj is not None:
            o = o * F.silu(self.g_proj(call.x))
        y: Tensor = self.o_proj(o)
        return y

    def per_head(self, x: Tensor) -> Tensor:
        """[B, T, inner] -> [B, T, num_heads, head_v_dim]."""
        return split(x, self.num_heads, self.head_v_dim)

    def step_rank(self) -> int:
        """Channels between the values and their step sizes."""
        return -(-self.hidden_size // STEP_RANK_SHARE)

    def rates(self) -> Tensor:
        """log(1), ..., log(K) for every value channel."""
        rate = torch.arange(1, self.head_k_dim + 1, dtype=torch.float32)
        return rate.log().repeat(self.num_heads, self.head_v_dim, 1)
