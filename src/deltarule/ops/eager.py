"""Calls that nothing watches: there a registered operator costs the host time, and nothing else."""

from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from deltarule.ops.dispatch import triton_missing

Function = TypeVar("Function", bound=Callable[..., object])
PLAIN = {Tensor, Parameter, NoneType}


def unwatched(tensors: Iterable[Tensor | None]) -> bool:
    """Whether no compiler, transform, mode or kind of tensor asks for the operator."""
    return nothing_watches() and PLAIN.issuperset(map(type, tensors))


def nothing_watches() -> bool:
    """Whether no compiler, transform or mode asks for operators."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
    )


# Ready, because a decoding step on a CPU is told so some 50 times.
ON_CPU = "Triton needs a CUDA device, and x is on cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not_fused(x: Tensor) -> str | None:
    """Why no Triton kernel takes x, or None; kernels compute in float32."""
    if x.is_cpu:
        return ON_CPU
    if x.device.type != "cuda":
        return f"Triton needs a CUDA device, and x is on {x.device}"
    # Code compiled for a GPU has Triton, and the compiler cannot follow a look for it.
    if not torch.compiler.is_compiling() and (reason := triton_missing(x.device)):
        return reason
    if x.dtype not in DTYPES:
        return f"the Triton kernels compute in float32, and x is {x.dtype}"
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return "torch.func's transforms need plain PyTorch"
    return None


def run_fused(operator: Any, *arguments: Any) -> Any:
    """Call a fused operator."""
    return operator(*arguments)


def constant_when_compiled(function: Function) -> Function:
    """Let the compiler call it once instead of following it to a file.

    What torch.compiler.assume_constant_result does, without loading the compiler with the package.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function
