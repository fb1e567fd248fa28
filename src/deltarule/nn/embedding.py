"""Vectors of tokens, whose gradient is summed in one order by kernels of two kinds."""

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deltarule.nn.linears import is_hooked
from deltarule.ops.dispatch import are_plain_eager, is_plain_eager
from deltarule.ops.fused_kernels import is_hopper, why_not_fused
from deltarule.ops.operators import differentiated, direct

# Tokens, and numbers of the weight, up to which products are faster than a sort: on an H200, 8,192
# rows of 257 by 256 take 36 us, but 16,384 of 257 by 512 take 134 in place of 59.
MOST_TOKENS, MOST = 512, 2**17


def embedded(module: nn.Module, tokens: Tensor) -> Tensor:
    """module(tokens): rows of its weight."""
    if is_plain_eager() and has_kernel(module) and are_plain_eager((module.weight, tokens)):
        return direct(Embedded)(module.weight, tokens)
    y: Tensor = module(tokens)
    return y


def has_kernel(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether a call is a look-up alone, whose gradient is wanted and has a kernel."""
    if type(module) is not nn.Embedding or is_hooked(module):
        return False
    options = module.padding_idx, module.max_norm, module.sparse, module.scale_grad_by_freq
    plain = options == (None, None, False, False) and differentiated((module.weight,))
    # Of other GPUs none was timed, and on sm_120 it spills.
    return plain and why_not_fused(module.weight) is None and is_hopper(module.weight.device)


class Embedded(torch.autograd.Function):
    """Rows of a weight by tokens."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(weight, tokens)
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        from deltarule.ops.fused import embedding_triton as kernels

        weight, tokens = ctx.saved_tensors
        few = len(weight) <= MOST_TOKENS and weight.numel() <= MOST
        gradient = kernels.embedding_gradient if few else kernels.sums_by_token
        return gradient(d_x, tokens, weight), None
