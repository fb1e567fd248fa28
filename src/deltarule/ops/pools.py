"""What every function on a pool of states checks: the pool, its slots, and where things go."""

from collections.abc import Iterable, Sequence
from numbers import Integral

import torch
from torch import Tensor

from deltarule.ops.checks import check_dense, readable, shape


def check_pool(
    pool: Tensor, axes: str, size: Sequence[int], dtypes: Iterable[torch.dtype], x: Tensor
) -> None:
    """Slots of so many numbers each, where x lies."""
    check_dense("state", pool, f" {axes}")
    if pool.ndim != len(size) + 1 or list(pool.shape[1:]) != list(size):
        raise ValueError(f"state must be {axes} = [*, {str(list(size))[1:]}, got {shape(pool)}")
    if pool.dtype not in dtypes or pool.device != x.device:
        kinds = " or ".join(map(str, dtypes))
        raise ValueError(f"state must be {kinds} on {x.device}, got {kind(pool)}")
    strides = pool.stride()
    if 0 in strides and any(n > 1 and s == 0 for n, s in zip(pool.shape, strides, strict=True)):
        raise ValueError("state must not be expanded, it is written to: call .clone()")


def check_indices(
    name: str, indices: Tensor, axes: str, rows: int, pool: Tensor, null_index: int,
    *, below: bool = True, written: bool = True,
) -> None:  # fmt: skip
    """Slots for each of so many rows; values are read only where that costs no waiting.

    Null is the index null_index or, with `below`, whatever is not above it.
    """
    check_dense(name, indices, f" {axes}")
    if indices.dtype not in (torch.int32, torch.int64) or indices.device != pool.device:
        said = f"{name} must be an int32 or int64 tensor on {pool.device}"
        raise ValueError(f"{said}, got {kind(indices)}")
    if isinstance(null_index, bool) or not isinstance(null_index, Integral):
        raise ValueError(f"null_index must be an integer, got {null_index!r}")
    if not 1 <= indices.ndim <= axes.count("[") or len(indices) != rows:
        raise ValueError(f"{name} must be {axes} with {axes[1]} = {rows}, got {shape(indices)}")
    if not readable(indices):
        return
    # A wrong one would change another's state.
    given = indices.flatten().tolist()
    slots = [x for x in given if (x > null_index if below else x != null_index)]
    for slot in slots:
        if not 0 <= slot < len(pool):
            raise ValueError(
                f"{name} must lie in [0, {len(pool)}) or be null_index={null_index}, got {slot}"
            )
    if written and len(set(slots)) < len(slots):
        raise ValueError(f"{name} must name no slot twice, got {indices.tolist()}")


def check_slots(reads: Tensor, writes: Tensor, rows: int, pool: Tensor, null_index: int) -> None:
    """The slot that each of so many rows starts from, and the one where it ends."""
    check_indices("state_indices", reads, "[N]", rows, pool, null_index, written=reads is writes)
    check_indices("write_indices", writes, "[N]", rows, pool, null_index)


def check_room(name: str, room: Tensor | None, axes: str, size: Sequence[int], x: Tensor) -> None:
    """Where something goes that is like x but for its size."""
    if room is None:
        return
    check_dense(name, room, " or None")
    if list(room.shape) != list(size):
        raise ValueError(f"{name} must be {axes} = {list(size)}, got {shape(room)}")
    if room.dtype != x.dtype or room.device != x.device or not room.is_contiguous():
        given = f"{kind(room)} with strides {room.stride()}"
        raise ValueError(f"{name} must be contiguous, {kind(x)}, got {given}")


def kind(x: Tensor) -> str:
    return f"{x.dtype} on {x.device}"
