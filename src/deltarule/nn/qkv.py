"""The frame of the layers whose operator takes q, k and v and is no linear recurrence.

project -> short convolution -> operator -> norm and output gate -> project
"""

from abc import abstractmethod
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.arguments import above_zero, default, default_head_dim, positive
from deltarule.nn.call import Call
from deltarule.nn.frame import FramedMixer
from deltarule.nn.heads import split
from deltarule.nn.norm import GatedRMSNorm


class QKVMixer(FramedMixer):
    """A layer that projects to q, k and v, reads its memory with q, and projects back.

    Args:
        hidden_size: Channels of x.
        num_heads: Heads.
        head_k_dim: Channels K of a query or key. None: hidden_size / num_heads.
        head_v_dim: Channels V of a value. None: head_k_dim.
        conv_size: Taps of the short convolution; 0 removes it. None: the layer's default.
        output_gate: Whether to gate the output. None: the layer's default.
        norm_eps: Added to the mean square in the norm of the output.

    Raises:
        ValueError: A size is out of range, or means nothing for this layer.
    """

    default_conv_size: ClassVar[int] = 4
    default_output_gate: ClassVar[bool] = False
    # Which of q, k and v are convolved, and SiLU follows the others where they are not.
    convolved: ClassVar[tuple[str, ...]] = ("q", "k", "v")

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
        """Build the projections, the convolutions, what the operator needs, and the norm."""
        super().__init__(hidden_size, num_heads=num_heads)
        self.hidden_size = positive("hidden_size", hidden_size)
        self.num_heads = positive("num_heads", num_heads)
        if head_k_dim is None:
            head_k_dim = default_head_dim("head_k_dim", 1, hidden_size, "num_heads", num_heads)
        self.head_k_dim = positive("head_k_dim", head_k_dim)
        self.head_v_dim = positive("head_v_dim", default(head_v_dim, head_k_dim))
        self.norm_eps = above_zero("norm_eps", norm_eps)
        sizes = self.stream_sizes()
        for name, size in sizes.items():
            setattr(self, f"{name}_proj", nn.Linear(hidden_size, size, bias=False))
        conv_size = default(conv_size, self.default_conv_size)
        self.build_convolutions(conv_size, {name: sizes[name] for name in self.convolved})
        self.build_memory()
        self.g_proj = None
        if default(output_gate, self.default_output_gate):
            self.g_proj = nn.Linear(hidden_size, sizes["v"], bias=False)
        self.o_norm = self.build_norm()
        self.o_proj = nn.Linear(sizes["v"], hidden_size, bias=False)

    @abstractmethod
    def build_memory(self) -> None:
        """Make the gates and whatever else the operator is given."""

    def build_norm(self) -> nn.Module:
        """Make the norm of each head."""
        return GatedRMSNorm(self.head_v_dim, self.norm_eps)

    @abstractmethod
    def read(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Run the operator on [B, T, num_heads, channels]; fill call.after."""

    def stream_sizes(self) -> dict[str, int]:
        """Channels of q, k and v over all heads."""
        key_size, value_size = (self.num_heads * d for d in (self.head_k_dim, self.head_v_dim))
        return {"q": key_size, "k": key_size, "v": value_size}

    def stream(self, name: str, call: Call) -> Tensor:
        """Project x to q, k or v, convolve it, and split it into heads."""
        y: Tensor = getattr(self, f"{name}_proj")(call.x)
        if name in self.convolved:
            y = self.convolve(name, y, call)
        return split(y, self.num_heads, y.shape[-1] // self.num_heads)

    def mix(self, call: Call) -> Tensor:
        """Project, read, normalise, gate, and project back."""
        q, k, v = (self.stream(name, call) for name in "qkv")
        o = self.read(q, k, v, call).to(v.dtype)
        gate = None if self.g_proj is None else self.g_proj(call.x)
        y: Tensor = self.o_proj(self.finish(o, gate))
        return y

    def finish(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """Normalise each head and gate it: [B, T, num_heads, V] -> [B, T, num_heads * V]."""
        gate = None if gate is None else split(gate, self.num_heads, self.head_v_dim)
        return self.o_norm(o, gate).flatten(-2)


def activated(mixer: QKVMixer, *streams: Tensor) -> tuple[Tensor, ...]:
    """SiLU, where no convolution has brought its own."""
    return streams if mixer.conv_size else tuple(F.silu(x) for x in streams)
