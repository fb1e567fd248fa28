"""One token of a block without gradients: what stands before a product is made within it.

    x <- x + mixer(norm(x))         norm and q, k, v, gates | convolutions | step | norm, gate, o
    x <- x + mlp(norm(x))           norm and gate, up | SiLU, product, down

Six kernels, each of which reads what it multiplies with before it needs the one before.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deltarule.nn.few_rows import as_one, kernel_rows
from deltarule.nn.linears import is_hooked, plain_weights
from deltarule.nn.mlp import SwiGLU
from deltarule.nn.norm import GatedRMSNorm, RMSNorm
from deltarule.ops.dispatch import is_plain_eager

# Channels whose norm a program computes at once.
MOST_NORMED = 4096


def fits(
    x: Tensor, whole: nn.Module, norms: Sequence[nn.Module], products: Sequence[nn.Module]
) -> bool:
    """Whether a module can be done within products: one row, plain norms and plain products."""
    # First what rules out nearly every call.
    if not x.is_cuda or x.numel() != x.shape[-1] or torch.is_grad_enabled():
        return False
    if not is_plain_eager() or is_hooked(whole) or not all(map(is_plain_norm, norms)):
        return False
    weights = plain_weights(products)
    return len(weights) == len(products) and kernel_rows(x, *weights) == 1


def is_plain_norm(module: nn.Module) -> bool:
    """Whether calling a module is a norm and nothing more, of as many channels as a program has."""
    if not isinstance(module, RMSNorm) or type(module) not in (RMSNorm, GatedRMSNorm):
        return False
    if is_hooked(module):
        return False
    return not module.zero_centered and module.weight.numel() <= MOST_NORMED


def fits_heads(heads: int, size: int) -> bool:
    """Whether a program can hold the heads of a token, each in a tile of its own."""
    return (1 << (heads - 1).bit_length()) * (1 << (size - 1).bit_length()) <= MOST_NORMED


def normed_products(x: Tensor, norm: Any, modules: Sequence[Any]) -> tuple[Tensor, ...]:
    from deltarule.ops.fused.one_row_triton import normed_row

    weights = [module.weight for module in modules]
    whole = as_one(weights)
    # Side by side in memory, they are one.
    matrices = weights if whole is None else [whole]
    found = [normed_row(x.view(1, -1), norm.weight, norm.eps, matrix) for matrix in matrices]
    parts = found if whole is None else found[0].split([len(weight) for weight in weights])
    return tuple(y.view(1, 1, -1) for y in parts)


def add_normed_product(x: Tensor, o: Tensor, gate: Tensor | None, norm: Any, module: Any) -> Tensor:
    """x + W (norm(o) activation(gate)), of heads o [1, 1, HV, V]."""
    from deltarule.ops.fused.one_row_triton import normed_row

    act, gates = ("none", None) if gate is None else (norm.activation, gate[0, 0])
    y = normed_row(o[0, 0], norm.weight, norm.eps, module.weight, gates, act, x.view(-1))
    return y.view(x.shape)


def add_mlp(x: Tensor, norm: Any, mlp: SwiGLU) -> Tensor:
    from deltarule.ops.fused.one_row_triton import one_row

    gate, up = normed_products(x, norm, (mlp.gate_proj, mlp.up_proj))
    y = one_row(gate.view(-1), mlp.down_proj.weight, up.view(-1), x.view(-1))
    return y.view(x.shape)
