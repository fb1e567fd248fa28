"""The arguments of `slstm` as the registered operator takes them, and where its sequences lie."""

from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.history import offsets_of, sequence_of


class SLSTMInputs(NamedTuple):
    """Gates [B, T, H, 4, D], recurrent weights [H, 4, D, D], a state [N, H, 4, D], and ends."""

    gates: Tensor
    recurrent: Tensor
    before: Tensor
    lengths: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.gates.dtype, torch.float32)

    @property
    def spans(self) -> tuple[Tensor, Tensor]:
        """[N] the first row of each sequence among all B T, and its tokens."""
        offsets = offsets_of(self.cu_seqlens, self.gates).long()
        return offsets[:-1], offsets.diff() if self.lengths is None else self.lengths

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """[B T] the sequence of each row, and how many tokens of it come before."""
        row = torch.arange(self.gates.shape[:2].numel(), device=self.gates.device)
        offsets = offsets_of(self.cu_seqlens, self.gates)
        sequence = sequence_of(offsets, len(row))
        return sequence, row - offsets[sequence]
