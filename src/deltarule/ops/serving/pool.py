"""Rows of a pool: out of the slots that are named, and back into them.

An index at or below `null_index` names no slot: it reads zeros and writes nothing.
"""

import torch
from torch import Tensor

from deltarule.ops.dispatch import are_plain_eager
from deltarule.ops.fused_kernels import why_not_fused


def read(pool: Tensor, slots: Tensor, null_index: int, dtype: torch.dtype) -> Tensor:
    """pool[slots] in `dtype`, contiguous; zeros where a slot is null."""
    run = _read if are_plain_eager((pool, slots)) else read_op
    return run(pool, slots, null_index, dtype)


def write(pool: Tensor, slots: Tensor, null_index: int, rows: Tensor) -> None:
    """pool[slots] = rows, where a slot is not null."""
    run = _write if are_plain_eager((pool, slots, rows)) else write_op
    run(pool, slots, null_index, rows)


def _read(pool: Tensor, slots: Tensor, null_index: int, dtype: torch.dtype) -> Tensor:
    rows = pool.new_zeros(len(slots), *pool.shape[1:], dtype=dtype)
    if why_not_fused(pool) is None:
        from deltarule.ops.serving.pool_triton import move

        move(pool, rows, slots, null_index, write=False)
        return rows
    real = named(slots, null_index)
    return rows.index_copy_(0, real, pool[slots[real].long()].to(dtype))


def _write(pool: Tensor, slots: Tensor, null_index: int, rows: Tensor) -> None:
    if why_not_fused(pool) is None:
        from deltarule.ops.serving.pool_triton import move

        move(pool, rows.contiguous(), slots, null_index, write=True)
        # A kernel's write goes past autograd, which must not use a pool that it saved before.
        torch.autograd.graph.increment_version(pool)
        return
    real = named(slots, null_index)
    pool[slots[real].long()] = rows[real].to(pool.dtype)


# What compilers see, which cannot follow rows that are found by value.
read_op = torch.library.custom_op("deltarule::pool_read", _read, mutates_args=())
write_op = torch.library.custom_op("deltarule::pool_write", _write, mutates_args=("pool",))


read_op.register_fake(
    lambda pool, slots, _, dtype: pool.new_empty(len(slots), *pool.shape[1:], dtype=dtype)
)


def named(slots: Tensor, null_index: int) -> Tensor:
    return (slots > null_index).nonzero().squeeze(-1)
