"""Several projections of one input, whose gradients are summed by the products themselves.

y_i = x W_i^T        dx = sum_i dy_i W_i        dW_i = dy_i^T x

Autograd alone would write each dy_i W_i and then add them: three passes over dx for each.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deltarule.nn.few_rows import as_one, product, several
from deltarule.ops.dispatch import are_plain_eager, without_autocast
from deltarule.ops.fused_kernels import why_not_fused
from deltarule.ops.operators import direct
from deltarule.ops.sequences import computed

WIDE = torch.float64
# In training: numbers of a weight that shares a product, and what the outputs of one are filled up
# to. In a step of 148 M on an H200, six products a layer, two of them of 6 outputs, take 6.5 ms.
SMALL, EVEN = 2**21, 8
# How often `adjoin` has moved weights: a CUDA graph captured before has the old addresses.
MOVES = [0]


def linears(x: Tensor, modules: Sequence[nn.Module], within: Any = None) -> tuple[Tensor, ...]:
    """Apply each module to x [..., I]: [..., O] for each.

    within: Convolutions of the first three; then weights lie together, and rows are few.
    """
    if within is not None:
        return in_one_product(x, plain_weights(modules), within)
    if x.is_cuda and not torch.compiler.is_compiling():
        if not torch.is_grad_enabled():
            return by_weights(x, modules, in_one_product)
        # float64 stays with what can be differentiated twice.
        if x.requires_grad and x.dtype != WIDE:
            return by_weights(x, modules, together)
    # A compiler sums gradients itself; on a CPU one more product costs less than avoiding it.
    return tuple([linear(x, module) for module in modules])


def by_weights(
    x: Tensor, modules: Sequence[nn.Module], products: Callable[..., Sequence[Tensor]]
) -> tuple[Tensor, ...]:
    """Apply modules to x, those that are a product with a weight all at once by `products`."""
    weights = [weight_of(module) for module in modules]
    plain = [weight for weight in weights if weight is not None]
    if not plain or not are_plain_eager((x, *plain)):
        return tuple([module(x) for module in modules])
    parts = iter(products(x, plain))
    pairs = zip(modules, weights, strict=True)
    return tuple([module(x) if weight is None else next(parts) for module, weight in pairs])


def adjoin(modules: Sequence[nn.Module]) -> None:
    """Lay the weights of plain products of one input end to end in memory.

    They stay the parameters that they are, at new addresses; `linears` then reads them in one
    product where nothing is differentiated.
    """
    weights = plain_weights(modules)
    alike = len({(type(w), w.dtype, w.device, w.shape[1]) for w in weights}) == 1
    if len(weights) < 2 or not alike or not are_plain_eager(weights) or as_one(weights) is not None:
        return
    whole = torch.cat([weight.detach() for weight in weights])
    for weight, part in zip(weights, whole.split([len(w) for w in weights]), strict=True):
        weight.data = part
    MOVES[0] += 1


def in_one_product(x: Tensor, weights: Sequence[Tensor], within: Any = None) -> tuple[Tensor, ...]:
    """Products without gradients: one, with weights that `adjoin` has laid together."""
    whole = as_one(weights) if len(weights) > 1 else None
    if whole is None:
        return tuple([product(x, weight) for weight in weights])
    y = product(x, whole) if within is None else several(x, whole, within=within)
    return y.split_with_sizes([weight.shape[0] for weight in weights], dim=-1)


def linear(x: Tensor, module: nn.Module) -> Tensor:
    """Apply one module to x [..., I]: [..., O]."""
    weight = None if torch.compiler.is_compiling() else weight_of(module)
    if weight is None:
        y: Tensor = module(x)
        return y
    # A call of the module would take Python as long as the product takes a processor.
    return multiplied(x, weight)


def multiplied(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, by what multiplies fastest."""
    if not torch.is_grad_enabled():
        return product(x, weight)
    if x.is_cuda and torch.is_autocast_enabled("cuda") and are_plain_eager((x, weight)):
        return together(x, [weight])[0] if x.dtype != WIDE else F.linear(x, weight)
    return F.linear(x, weight)


def together(x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Products whose gradients by x are summed by the products themselves, on any device."""
    return direct(Linears)(as_multiplied(x), *weights)


def as_multiplied(x: Tensor) -> Tensor:
    kind = x.device.type
    # PyTorch has no autocast to ask about on "meta". Asked in place: a helper would cost a call.
    autocast = not x.is_meta and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if autocast else x


def in_one_node(x: Tensor, modules: Sequence[nn.Module]) -> list[Tensor] | None:
    """x as multiplied, and the weights of modules, for a node of autograd that stands for all.

    None: nothing is differentiated, or one of them is more than a product.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    weights = plain_weights(modules)
    if len(weights) < len(modules) or not are_plain_eager((x, *weights)):
        return None
    return [as_multiplied(x), *weights]


def weight_of(module: nn.Module) -> Tensor | None:
    """The weight of a module whose call is a product with it and nothing more; else None."""
    if type(module) is not nn.Linear or is_hooked(module):
        return None
    # From its table: a Python function answers `module.weight`.
    own = module._parameters
    return own.get("weight") if own.get("bias") is None else None


def plain_weights(modules: Iterable[nn.Module]) -> list[Tensor]:
    return [weight for module in modules if (weight := weight_of(module)) is not None]


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling a module is a product with its weight and nothing more."""
    return weight_of(module) is not None


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks, or a forward in place of that of its type."""
    forward = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


class ExactLinear(nn.Linear):
    """A linear map whose result is in float32, of 16-bit inputs and weights too.

    For logits that go through exp: in bfloat16 a logit of 100 is off by up to 0.25, and the gate
    by a quarter. The backward reads x as it was given, so that no wider copy of it is kept.
    """

    def forward(self, x: Tensor) -> Tensor:
        compiled = torch.compiler.is_compiling()
        product: Any = wide_product if compiled else ExactProduct.apply
        y: Tensor = product(x, self.weight)
        return y if self.bias is None else y + self.bias


class ExactProduct(torch.autograd.Function):
    """x W^T in float32 at least."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return wide_product(x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        d_weight = wide_product(d_y.flatten(0, -2).mT, x.flatten(0, -2).mT)
        return wide_product(d_y, weight.mT).to(x.dtype), d_weight.to(weight.dtype)


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    with without_autocast(x.device):
        return F.linear(computed(x), computed(weight))


class Linears(torch.autograd.Function):
    """Products of one x with weights of one dtype; small ones are one, as the backward has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.groups, wholes, outputs = products_of(x, weights)
        ctx.dtype = weights[0].dtype
        ctx.save_for_backward(x, *wholes)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *wholes = ctx.saved_tensors
        return products_back(x, ctx.groups, wholes, d_outputs, ctx.needs_input_grad, ctx.dtype)


def products_of(
    x: Tensor, weights: Sequence[Tensor], *others: Tensor
) -> tuple[list["Group"], list[Tensor], list[Tensor]]:
    """Groups of weights, the matrix of each and then the others, and the product with each weight.

    Under autocast the matrices are rounded as it rounds them.
    """
    groups = groups_of(tuple([weight.shape for weight in weights]), SMALL)
    parts = [[weights[i] for i in group.places] for group in groups]
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        wholes = rounded([*parts, *others], [group.lacking for group in groups], x)
    else:
        pairs = zip(groups, parts, strict=True)
        wholes = [own[0] if len(own) == 1 else filled(own, g.lacking, 0) for g, own in pairs]
        wholes += others
    found: dict[int, Tensor] = {}
    with without_autocast(x.device):
        for group, whole in zip(groups, wholes, strict=False):
            found.update(zip(group.places, group.parts(F.linear(x, whole), -1), strict=True))
    return groups, wholes, [found[i] for i in range(len(weights))]


def rounded(
    matrices: Sequence[Tensor | Sequence[Tensor]], lacking: Sequence[Sequence[int]], x: Tensor
) -> list[Tensor]:
    """Matrices in the dtype of x; the first are of weights that lack so many rows of zeros each."""
    parts = [[own] if isinstance(own, Tensor) else own for own in matrices]
    lacking = [*lacking, *[[0]] * (len(parts) - len(lacking))]
    kinds = [(w.dtype, w.is_contiguous()) for own in parts for w in own]
    if {*kinds} == {(torch.float32, True)} and why_not_fused(x) is None:
        # Triton is an extra, imported where it runs.
        from deltarule.ops.fused import rounding_triton as kernels

        if len(kinds) <= kernels.MOST:
            return kernels.laid(parts, lacking, x.dtype)
    pairs = zip(parts, lacking, strict=True)
    return [filled([w.to(x.dtype) for w in own], lacks, 0) for own, lacks in pairs]


def gradient_of_weight(d_rows: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """dy^T x, not rounded to 16 bits on the way where that can be."""
    if rows.is_cuda:
        return torch.mm(d_rows.mT, rows, out_dtype=dtype)
    return (d_rows.mT @ rows).to(dtype)


def products_back(
    x: Tensor, groups: Sequence["Group"], wholes: Sequence[Tensor],
    d_outputs: Sequence[Tensor | None], wanted: Sequence[bool], dtype: torch.dtype,
    d_all: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients by x and by each weight, which is of dtype, those that are wanted.

    d_all: The matrix whose columns the d_outputs share out among them, if it is known; used where
        one product has all of them.
    """
    rows, total = x.flatten(0, -2), None
    found: list[Tensor | None] = [None] * len(wanted)
    for group, whole in zip(groups, wholes, strict=True):
        given = [d_outputs[i] for i in group.places]
        if all(d_y is None for d_y in given):
            continue
        if d_all is None or len(groups) > 1 or d_all.shape[1] != len(whole):
            d_rows = side_by_side(given, group, x)
        else:
            d_rows = d_all
        if wanted[0]:
            total = d_rows @ whole if total is None else total.addmm_(d_rows, whole)
        if any(wanted[1 + i] for i in group.places):
            same = dtype == rows.dtype
            d_whole = d_rows.mT @ rows if same else gradient_of_weight(d_rows, rows, dtype)
            parts = group.parts(d_whole, 0)
            for i, part in zip(group.places, parts, strict=True):
                found[1 + i] = part if wanted[1 + i] and d_outputs[i] is not None else None
    found[0] = None if total is None else total.view(x.shape)
    return tuple(found)


class Group(NamedTuple):
    """Weights that share a product: their places, their outputs, and how many each lacks.

    Several weights are each filled up to a multiple of EVEN outputs, so that each part of the
    product begins on the grid of 16 bytes that launches without Triton's search need.
    """

    places: list[int]
    sizes: list[int]
    lacking: list[int]
    # What a product is cut into, and which of that belongs to the weights.
    cuts: list[int]
    own: list[int]

    @classmethod
    def of(cls, shapes: Sequence[torch.Size], places: list[int]) -> "Group":
        sizes = [shapes[i][0] for i in places]
        lacking = [-size % EVEN if len(sizes) > 1 else 0 for size in sizes]
        cuts = [n for pair in zip(sizes, lacking, strict=True) for n in pair if n]
        own = accumulate([1 + (lacks > 0) for lacks in lacking[:-1]], initial=0)
        return cls(places, sizes, lacking, cuts, [*own])

    def parts(self, product: Tensor, dim: int) -> list[Tensor]:
        """What belongs to each weight, without what fills it up."""
        found = product.split_with_sizes(self.cuts, dim)
        return [found[i] for i in self.own]


def filled(given: Sequence[Tensor], lacking: Sequence[int], dim: int) -> Tensor:
    """One matrix of what is given, and after each the zeros that it lacks."""
    if not any(lacking):
        return given[0] if len(given) == 1 else torch.cat(list(given), dim)
    shape = list(given[0].shape)
    shape[dim] = most = max(lacking)
    zeros, whole = given[0].new_zeros(shape), []
    for x, lacks in zip(given, lacking, strict=True):
        gap = [zeros if lacks == most else zeros.narrow(dim, 0, lacks)] if lacks else []
        whole += [x, *gap]
    return torch.cat(whole, dim)


@lru_cache(256)
def groups_of(shapes: tuple[torch.Size, ...], most: int) -> list[Group]:
    """Weights of at most so many numbers, which alone fill no GPU, and each other on its own."""
    small = [i for i, shape in enumerate(shapes) if shape.numel() <= most]
    large = [[i] for i, shape in enumerate(shapes) if shape.numel() > most]
    return [Group.of(shapes, places) for places in ([small, *large] if small else large)]


def side_by_side(given: list[Tensor | None], group: Group, x: Tensor) -> Tensor:
    """Gradients [rows, sum of O] by the outputs of a product, zeros where there are none."""
    first = given[0]
    if len(given) == 1 and first is not None:
        return first.flatten(0, -2)
    parts = [
        x.new_zeros(*x.shape[:-1], size) if d_y is None else d_y
        for d_y, size in zip(given, group.sizes, strict=True)
    ]
    return filled(parts, group.lacking, -1).flatten(0, -2)
