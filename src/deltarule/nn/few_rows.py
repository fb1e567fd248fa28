"""One or two tokens of a block without gradients: what stands before a product is made within it.

    x <- x + mixer(norm(x))         norm and q, k, v, gates | convolutions | step | norm, gate, o
    x <- x + mlp(norm(x))           norm and gate, up | SiLU, product, down

Six kernels, each of which reads what it multiplies with before it needs the one before.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deltarule.nn.linears import FEW_ROWS, as_one, is_hooked, is_plain, reads_few
from deltarule.nn.mlp import SwiGLU
from deltarule.nn.norm import GatedRMSNorm, RMSNorm
from deltarule.ops.dispatch import nothing_watches

# Channels whose norm a program computes at once.
MOST_NORMED = 4096


def fits(
    x: Tensor, whole: nn.Module, norms: Sequence[nn.Module], products: Sequence[nn.Module]
) -> bool:
    """Whether a module can be done within products: few rows, plain norms and plain products."""
    # First what rules out nearly every call.
    if not x.is_cuda or x.shape[0] * x.shape[1] > FEW_ROWS or torch.is_grad_enabled():
        return False
    if not nothing_watches() or is_hooked(whole) or not all(map(is_plain_norm, norms)):
        return False
    weights = [module.weight for module in products if is_plain(module)]
    return len(weights) == len(products) and reads_few(x, *weights)


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
    """norm(x) times each weight."""
    from deltarule.ops.fused.few_rows_triton import normed_rows

    rows = x.reshape(-1, 1, x.shape[-1])
    weights = [module.weight for module in modules]
    whole = as_one(weights)
    # Side by side in memory, they are one.
    if whole is None:
        found = [normed_rows(rows, norm.weight, norm.eps, weight) for weight in weights]
    else:
        y = normed_rows(rows, norm.weight, norm.eps, whole)
        found = list(y.split([len(weight) for weight in weights], dim=-1))
    return tuple(y.view(*x.shape[:-1], -1) for y in found)


def add_normed_product(x: Tensor, o: Tensor, gate: Tensor | None, norm: Any, module: Any) -> Tensor:
    """x + W (norm(o) activation(gate)), of heads o [B, T, HV, V]."""
    from deltarule.ops.fused.few_rows_triton import normed_rows

    rows = x.reshape(-1, x.shape[-1])
    act = "none" if gate is None else norm.activation
    gates = None if gate is None else gate.flatten(0, 1)
    y = normed_rows(o.flatten(0, 1), norm.weight, norm.eps, module.weight, gates, act, rows)
    return y.view(x.shape)


def add_mlp(x: Tensor, norm: Any, mlp: SwiGLU) -> Tensor:
    """x + mlp(norm(x))."""
    from deltarule.ops.fused.few_rows_triton import few_rows

    gate, up = normed_products(x, norm, (mlp.gate_proj, mlp.up_proj))
    rows, size = x.reshape(-1, x.shape[-1]), gate.shape[-1]
    y = few_rows(gate.reshape(-1, size), mlp.down_proj.weight, up.reshape(-1, size), rows)
    return y.view(x.shape)
