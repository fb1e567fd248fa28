"""Gated DeltaNet-2 as a layer."""

from dataclasses import replace

from torch import nn

from deltarule.nn.call import Call
from deltarule.nn.heads import split
from deltarule.nn.kda import KDA
from deltarule.rules import Projections, gated_deltanet2


class GatedDeltaNet2(KDA):
    """Gated DeltaNet-2: S = S Diag(a) (I - (b * k) k^T) + (w * v) k^T with unit keys.

    Defaults: KDA's; in place of one write strength a head, an erase gate b for each key channel,
    in [0, beta_max], and a write gate w for each value channel, in [0, 1].

    Example:
        >>> import torch
        >>> y, state = GatedDeltaNet2(32, num_heads=2)(torch.zeros(1, 5, 32))
        >>> state["recurrent"].shape
        torch.Size([1, 2, 16, 16])

    Source: arXiv 2605.22791, section 3.
    """

    rule = gated_deltanet2.RULE
    frees_strength = True

    def build_gates(self) -> None:
        """Add the erase and the write gate of each channel."""
        super().build_gates()
        heads = self.num_v_heads
        self.erase_proj = nn.Linear(self.hidden_size, heads * self.head_k_dim, bias=False)
        self.write_proj = nn.Linear(self.hidden_size, heads * self.head_v_dim, bias=False)

    def project(self, call: Call) -> Projections:
        """Add both gates."""
        erase = split(self.erase_proj(call.x), self.num_v_heads, self.head_k_dim)
        write = split(self.write_proj(call.x), self.num_v_heads, self.head_v_dim)
        return replace(super().project(call), erase_logits=erase, write_logits=write)
