"""What the layers share whose state is a vector: each channel keeps a number, and decays it.

h_t = a_t * h_{t-1} + w_t        `selective_scan` with one key channel, q = k = 1
"""

from typing import ClassVar

import torch
from torch import Tensor

from deltarule.nn.call import LayerCall
from deltarule.nn.checks import default_head_dim
from deltarule.nn.gates import computed
from deltarule.nn.mixer import Mixer
from deltarule.nn.options import COMMON
from deltarule.nn.scan_mixer import scan


class VectorMixer(Mixer):
    """A layer of independent channels; num_heads only groups them, and there is no norm."""

    options = COMMON - {"head_k_dim", "norm_eps"}
    convolved: ClassVar[tuple[str, ...]] = ("v",)
    normless = True

    def default_head_k_dim(self) -> int:
        return 1

    def default_head_v_dim(self) -> int:
        sizes = self.hidden_size, "num_heads", self.num_heads
        return self.expand_v * default_head_dim("head_v_dim", 1, *sizes)

    def stream_sizes(self) -> dict[str, int]:
        return {"v": self.num_heads * self.head_v_dim}

    def memories(self) -> dict[str, tuple[int, ...]]:
        return {"recurrent": (self.num_heads, self.head_v_dim, 1)}

    def run(self, writes: Tensor, log_decay: Tensor, call: LayerCall) -> Tensor:
        """h [B, T, H, channels], in float32 at least, of writes and logs of the same shape."""
        writes = computed(writes)
        one = torch.ones(*writes.shape[2:], 1, dtype=writes.dtype, device=writes.device)
        decay = log_decay.expand(writes.shape)
        given = {"q": one, "k": one, "v": writes, "value_log_decay": decay, "scale": 1.0}
        return scan(given, call)
