"""Calls that nothing watches: there a registered operator costs the host time, and nothing else."""

from collections.abc import Iterable
from types import NoneType

import torch
from torch import Tensor
from torch.nn import Parameter

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
