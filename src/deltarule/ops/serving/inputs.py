"""What every function on a pool checks: its slots and its offsets."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from deltarule.ops.checks import check_dense, readable, shape
from deltarule.ops.delta_rule.step import INDEX_DTYPES


def check_pool(
    name: str, pool: Tensor, size: Sequence[int], axes: str, dtypes: Iterable[torch.dtype]
) -> None:
    check_dense(name, pool, f" {axes}")
    if pool.ndim != len(size) + 1 or list(pool.shape[1:]) != list(size):
        raise ValueError(f"{name} must be {axes} = [*, {str(list(size))[1:]}, got {shape(pool)}")
    if pool.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, got {pool.dtype}")


def check_indices(
    name: str, indices: Tensor, rows: int, pool: Tensor, null_index: int,
    *, by_token: bool = False, written: bool = True,
) -> None:  # fmt: skip
    """Slots [N] or, by token, [N, S]; values are read only where that costs no waiting."""
    axes = "[N] or [N, S]" if by_token else "[N]"
    check_dense(name, indices, f" {axes}")
    if indices.dtype not in INDEX_DTYPES or indices.device != pool.device:
        raise ValueError(
            f"{name} must be an int32 or int64 tensor on {pool.device}, got {indices.dtype} on "
            f"{indices.device}"
        )
    if len(indices) != rows or indices.ndim not in ((1, 2) if by_token else (1,)):
        raise ValueError(f"{name} must be {axes} with N = {rows}, got {shape(indices)}")
    if readable(indices):
        slots = [slot for slot in indices.flatten().tolist() if slot > null_index]
        if slots and max(slots) >= len(pool):
            raise ValueError(f"{name} must lie below {len(pool)} slots, got {max(slots)}")
        if written and len(set(slots)) < len(slots):
            raise ValueError(f"{name} must name no slot twice, got {indices.tolist()}")


def check_slots(reads: Tensor, writes: Tensor, rows: int, pool: Tensor, null_index: int) -> None:
    """The slot that each of so many rows starts from, and the one where it ends."""
    check_indices("state_indices", reads, rows, pool, null_index, written=reads is writes)
    check_indices("write_indices", writes, rows, pool, null_index)


def check_out(out: Tensor | None, like: Tensor, expected: Sequence[int]) -> None:
    if out is None:
        return
    check_dense("out", out, " or None")
    if list(out.shape) != list(expected) or out.dtype != like.dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous, {list(expected)} and {like.dtype}, got {shape(out)} in "
            f"{out.dtype}"
        )


def offsets_of(cu_seqlens: Tensor | None, x: Tensor) -> Tensor:
    """Offsets [N + 1] of the rows of x [B, T, ...], as if they lay end to end."""
    if cu_seqlens is not None:
        return cu_seqlens.to(x.device)
    return torch.arange(x.shape[0] + 1, device=x.device) * x.shape[1]
