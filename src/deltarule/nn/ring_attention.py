"""Softmax attention over a context by PyTorch's own ring, which takes one process after the other.

Each process keeps its own keys and values, and those of one other at a time, whatever the length of
the row. PyTorch's public form has no kernel for CPUs, lays rows out by halves from both ends, and
gathers all keys unless told otherwise; its core, which is called here, takes any kernel, rows in
their order, and passes keys on from process to process.
"""

import importlib
import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltarule.nn.masked_attention import takes_offsets
from deltarule.ops.context import Context

CORE = "torch.distributed.tensor.experimental._context_parallel._attention"
# What the kernel on a GPU returns beside outputs and logarithms of sums, and is given backwards.
KEPT = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")


@cache
def core() -> Any:
    """PyTorch's module, which is not public; None where it is not the one that is meant here."""
    try:
        module = importlib.import_module(CORE)
        takes = inspect.signature(module._templated_ring_attention).parameters
        _ = module._cp_options.rotate_method, module._RotateMethod.ALL_TO_ALL
    except (ImportError, AttributeError):
        return None
    return module if next(iter(takes)) == "group" else None


def rings(context: Context, q: Tensor, v: Tensor) -> bool:
    """Whether the ring takes queries and values [B, T here, heads, D]: whole rows, equal shares."""
    shares = {b - a for a, b in itertools.pairwise(context.bounds)}
    if context.offsets is not None or len(shares) > 1 or q.shape[-1] != v.shape[-1]:
        return False
    return (q.device.type == "cpu" or takes_offsets(q, v)) and core() is not None


def ring(context: Context, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention of the tokens here [B, T here, heads, D] to all up to each."""
    given = (x.transpose(1, 2) for x in (q, k, v))
    o: Tensor = _Ring.apply(context.group, scale, *given)  # type: ignore[no-untyped-call]
    return o.transpose(1, 2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: Any, scale: float | None, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        ctx.group, ctx.options = group, {"is_causal": True, "dropout_p": 0.0, "scale": scale}
        with in_order(q.dtype):
            o, sums, *kept = core()._templated_ring_attention(
                group, 2, kernel(q), q, k, v, **ctx.options
            )
        ctx.kept = dict(zip(KEPT, kept, strict=False))
        ctx.save_for_backward(q, k, v, o, sums)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor) -> tuple[Any, ...]:
        q, *others = ctx.saved_tensors
        with in_order(q.dtype):
            given = kernel(q, "_backward"), d_o, "grad_out", q, *others
            backward = core()._templated_ring_attention_backward
            gradients = backward(ctx.group, 2, *given, **ctx.options, **ctx.kept)
        return None, None, *gradients[:3]


def kernel(q: Tensor, direction: str = "") -> Any:
    """PyTorch's flash attention on the device of q."""
    place = "_for_cpu" if q.device.type == "cpu" else ""
    return getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{place}{direction}")


@contextmanager
def in_order(dtype: torch.dtype) -> Iterator[None]:
    """Within, rows are in their order, keys passed on, and sums in float32 or float64."""
    options = core()._cp_options
    ours = {
        "enable_load_balance": False, "convert_to_f32": dtype != torch.float64,
        "rotate_method": core()._RotateMethod.ALL_TO_ALL,
    }  # fmt: skip
    before = {name: getattr(options, name) for name in ours}
    vars(options).update(ours)
    try:
        yield
    finally:
        vars(options).update(before)
