"""Kernels of fused maps, of memories and of pools: whether one takes a tensor; their operators."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deltarule.ops.dispatch import warn_slow, why_no_triton
from deltarule.ops.operators import Operator
from deltarule.ops.registration import Rules

# A constant, because a decoding step on a CPU needs it some 50 times.
ON_CPU = "Triton needs CUDA tensors, and x is on cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not_fused(x: Tensor, name: str = "x") -> str | None:
    """Why no Triton kernel takes x, or None; `name` is what a caller calls it."""
    if x.is_cpu and name == "x":
        return ON_CPU
    if reason := why_no_triton(name, x):
        return reason
    if x.dtype not in DTYPES:
        return f"the Triton kernels compute in float32, and {name} is {x.dtype}"
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return "torch.func's transforms need plain PyTorch"
    return None


def kernel_runs(x: Tensor, why_not: str | None) -> bool:
    """Whether a fused map of x runs its kernel; a GPU is told once of each reason why not."""
    if why_not is not None and x.is_cuda:
        warn_slow("torch", why_not)
    return why_not is None


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether a GPU has the products and the copy engine of capability 9, which no other has."""
    return torch.cuda.get_device_capability(device)[0] == 9


def as_rows(x: Tensor, axes: int = 1) -> Tensor:
    """[..., channels in the last axes] -> [M, C]: a view wherever the others follow each other."""
    size = x.shape[-axes:].numel()
    return x.reshape(-1, size) if x.numel() else x.new_empty(0, size)


def adjacent(x: Tensor) -> Tensor:
    """The tensor, whatever its other strides, or a copy if its last is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def kernel_operator(
    name: str, inputs: type[Any], module: str, fake: Callable[[Any], Any], rules: Rules,
    returned: int = 1,
) -> Operator[Any]:  # fmt: skip
    """The operator of two functions of a module of this package, `name` and `name`_backward.

    They take the inputs, and what `Registered` gives a backward; see there for the rest. Triton is
    an extra: the module is imported where it runs.
    """

    @cache
    def kernels() -> Any:
        return import_module(f"{__package__}.{module}")

    def forward(given: Any) -> Any:
        return getattr(kernels(), name)(given)

    def backward(*given: Any) -> Any:
        return getattr(kernels(), f"{name}_backward")(*given)

    return Operator(name, inputs, forward, backward, fake, returned=returned, rules=rules)
