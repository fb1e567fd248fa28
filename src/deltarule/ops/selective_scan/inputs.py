"""The arguments of one call of `selective_scan`: what it checks and every backend is given."""

from typing import NamedTuple

import torch
from torch import Tensor


class ScanInputs(NamedTuple):
    """One call; q and k are [B, T, H, K], or [HV, V, K] where they are constant over time."""

    q: Tensor
    k: Tensor
    v: Tensor
    delta: Tensor | None
    A: Tensor | None
    value_log_decay: Tensor | None
    log_decay: Tensor | None
    beta: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    signed: bool = False

    @property
    def sequences(self) -> int:
        return self.v.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return self.sequences, self.v.shape[2], self.v.shape[3], self.q.shape[-1]

    @property
    def output_shape(self) -> torch.Size:
        return self.v.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the state and of all sums."""
        return torch.float64 if self.v.dtype == torch.float64 else torch.float32
