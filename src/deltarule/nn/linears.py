"""Several projections of one input, whose gradients are summed by the products themselves.

y_i = x W_i^T        dx = sum_i dy_i W_i        dW_i = dy_i^T x

Autograd alone would write each dy_i W_i and then add them: three passes over dx for each.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deltarule.ops.eager import unwatched

WIDE = torch.float64


def linears(x: Tensor, modules: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Apply each module to x [..., I]: [..., O] for each."""
    differentiated = torch.is_grad_enabled() and x.requires_grad
    # A compiler sees the sum itself; float64 keeps what can be differentiated twice.
    if torch.compiler.is_compiling() or not (differentiated and x.is_cuda and x.dtype != WIDE):
        return tuple(module(x) for module in modules)
    return together(x, modules)


def together(x: Tensor, modules: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """`linears` on any device, of those modules that are a product and nothing more."""
    weights: dict[int, Tensor] = {
        i: module.weight for i, module in enumerate(modules) if is_plain(module)
    }  # fmt: skip
    if not unwatched((x, *weights.values())):
        weights = {}
    given = x
    if weights and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        given, weights = x.to(dtype), {i: weight.to(dtype) for i, weight in weights.items()}
    products = Linears.apply(given, *weights.values()) if weights else ()  # type: ignore[no-untyped-call]
    found: dict[int, Tensor] = dict(zip(weights, products, strict=True))
    return tuple(found[i] if i in found else module(x) for i, module in enumerate(modules))


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling a module is a product with its weight and nothing more."""
    watched = (
        module._forward_hooks or module._forward_pre_hooks
        or module._backward_hooks or module._backward_pre_hooks
    )  # fmt: skip
    return type(module) is nn.Linear and module.bias is None and not watched


class Linears(torch.autograd.Function):
    """Products of one x with several weights, all of one dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """[..., O] for each weight [O, I]."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights)
        with torch.autocast(x.device.type, enabled=False):
            return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients by x and by each weight."""
        x, *weights = ctx.saved_tensors
        wants_x, *wanted = ctx.needs_input_grad
        rows, total = x.flatten(0, -2), None
        d_weights: list[Tensor | None] = [None] * len(weights)
        for i, (weight, d_y) in enumerate(zip(weights, d_outputs, strict=True)):
            if d_y is None:
                continue
            d_rows = d_y.flatten(0, -2)
            if wants_x:
                total = d_rows @ weight if total is None else total.addmm_(d_rows, weight)
            if wanted[i]:
                d_weights[i] = d_rows.mT @ rows
        return None if total is None else total.view(x.shape), *d_weights
