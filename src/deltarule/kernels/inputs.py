"""The arguments of one call: what the operators check and every backend is given."""

from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """One call of an operator. `beta`, or `a` and `b`, or neither says what is erased."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    a: Tensor | None
    b: Tensor | None
    log_decay: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    n_steps: int
    scale: float
    normalize_qk: bool
    batch_invariant: bool

    def rows(self, rows: Tensor) -> "Inputs":
        """Only these rows of a batch."""

        def picked(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[rows]

        return self._replace(
            q=self.q[rows], k=self.k[rows], v=self.v[rows], beta=picked(self.beta),
            a=picked(self.a), b=picked(self.b), log_decay=picked(self.log_decay),
            initial_state=picked(self.initial_state),
        )  # fmt: skip

    @property
    def erase(self) -> str:
        """none, tied or free."""
        return "free" if self.a is not None else "none" if self.beta is None else "tied"

    @property
    def decay(self) -> str:
        """none, head or channel."""
        if self.log_decay is None:
            return "none"
        return "channel" if self.log_decay.ndim == 4 else "head"

    @property
    def by_channel(self) -> bool:
        """Whether pairs of rows take q and k scaled channel by channel."""
        return self.erase == "free" or self.decay == "channel"

    @property
    def sequences(self) -> int:
        """N: batch rows, or packed sequences."""
        return self.q.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """[N, HV, V, K]."""
        return self.sequences, self.v.shape[2], self.v.shape[3], self.q.shape[3]

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        """[B, T, HV, V]."""
        return self.q.shape[0], self.q.shape[1], self.v.shape[2], self.v.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """In which the state is kept and everything is computed."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32
