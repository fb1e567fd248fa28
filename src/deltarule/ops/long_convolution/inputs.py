"""The arguments of `long_convolution`, checked and as the registered operator takes them."""

from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.checks import FLOATS, check_gate, check_sequence, shape


class ConvolutionInputs(NamedTuple):
    """Values, taps, and queries and keys if any, of rows that begin with what came before."""

    v: Tensor
    taps: Tensor
    q: Tensor | None
    k: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.v.dtype, torch.float32)


def check_convolution(v: Tensor, taps: Tensor, q: Tensor | None, k: Tensor | None) -> None:
    if not isinstance(v, Tensor) or v.ndim != 4 or v.dtype not in FLOATS:
        given = f"{v.dtype} {shape(v)}" if isinstance(v, Tensor) else type(v).__name__
        raise ValueError(f"v must be a floating-point tensor [B, T, H, V], got {given}")
    if (q is None) != (k is None):
        raise ValueError(f"q and k go together, got only {'k' if q is None else 'q'}")
    if q is not None and k is not None:
        check_sequence(q, k, v, 1)
        if q.shape[2] != v.shape[2]:
            raise ValueError(
                f"v must have the H={q.shape[2]} heads of q and k, whose filters are theirs, "
                f"got {v.shape[2]}"
            )
    if not isinstance(taps, Tensor) or taps.ndim != 2 or taps.shape[1] == 0:
        given = shape(taps) if isinstance(taps, Tensor) else type(taps).__name__
        raise ValueError(f"taps must be a tensor [H, L], L of 1 or more, got {given}")
    check_gate("taps", taps, v, {"[H, L]": (v.shape[2], taps.shape[1])})
