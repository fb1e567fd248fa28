"""Projections of one input, of which q, k and v are convolved, as one node of autograd.

Their gradients are written side by side, as the columns of one product: that of the output gate by
the node that reads the gate, all others by this one. Laid together afterwards, they would be read
and written once more.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deltarule.nn.layout import Layout
from deltarule.nn.linears import EVEN, SMALL, in_one_node, linear, products_back, products_of
from deltarule.nn.rule import CONVOLUTIONS, LayerCall
from deltarule.nn.short_conv import is_fused, packing
from deltarule.ops.dispatch import are_plain_eager
from deltarule.ops.fused import short_conv as fused
from deltarule.ops.operators import direct


class Room:
    """The memory of the gradients by all parts of one product, which two nodes write.

    The first of them makes it in every backward, and the product's own node takes it.
    """

    def __init__(self) -> None:
        # All of it, [..., sum of O], and its parts.
        self.made: tuple[Tensor, tuple[Tensor, ...]] | None = None
        # Of each part with the columns that fill it up.
        self.sizes: list[int] = []

    def slot(self, place: int, like: Tensor) -> Tensor:
        """Memory of the gradient by the part `like` [..., O]: among the others, or on its own."""
        if self.sizes[place] != like.shape[-1]:
            return like.new_empty(like.shape)
        self.made = self.new(like)
        return self.made[1][place]

    def new(self, like: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        whole = like.new_empty(*like.shape[:-1], sum(self.sizes))
        return whole, whole.split_with_sizes(self.sizes, -1)

    def take(self, like: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        made, self.made = self.made, None
        return self.new(like) if made is None else made


class Convolved(NamedTuple):
    """What a node of autograd makes of one input.

    y: q, k and v, convolved.
    others: Further products.
    after: The next histories of q, k and v.
    streams: q, k and v before their convolution, without gradients.
    room: Of the gradients by all products: q, k, v and the others.
    """

    y: tuple[Tensor, ...]
    others: tuple[Tensor, ...]
    after: list[Tensor]
    streams: list[Tensor]
    room: Room


def convolved_products(
    x: Tensor, modules: Sequence[nn.Module], convolutions: Sequence[nn.Module],
    histories: Sequence[Tensor | None], layout: Layout,
) -> Convolved | None:  # fmt: skip
    """Projections of x, the first three of them convolved, as one product and one node of autograd.

    None where modules are more than that, kernels do not run, or weights are so large that each has
    a product of its own.
    """
    if not all(map(is_fused, convolutions, repeat(x))):
        return None
    if (given := in_one_node(x, modules)) is None or max(map(Tensor.numel, given[1:])) > SMALL:
        return None
    taps = [(module._parameters["weight"], module.activated) for module in convolutions]
    weights, activated = zip(*taps, strict=True)
    if any(len(weight) % EVEN for weight in weights) or not are_plain_eager((*weights, *histories)):
        return None
    before = [None if h is None else h.to(given[0].dtype) for h in histories]
    found = Convolved((), (), [], [], Room())
    numbers = found, len(modules), activated
    y = direct(ConvolvedProducts)(*numbers, *given, *weights, *before, *packing(layout))
    return found._replace(y=y[:3], others=y[3:-3], after=list(y[-3:]))


def convolve_products(
    call: LayerCall, modules: Mapping[str, nn.Module], parts: Mapping[str, Any]
) -> bool:
    """Apply a layer's modules to x and convolve q, k and v in one node, if that is all they are."""
    convolutions = [parts[key] for key in CONVOLUTIONS]
    histories: list[Any] = [call.before.get(key) for key in CONVOLUTIONS]
    joined = [name for name, x in modules.items() if type(x) is nn.Linear]
    if joined[:3] != [*"qkv"]:
        return False
    of_all = [modules[name] for name in joined], convolutions, histories, call.layout
    if (found := convolved_products(call.x, *of_all)) is None:
        return False
    if len(joined) < len(modules):
        others = {name: module for name, module in modules.items() if name not in joined}
        call.projected.update({name: linear(call.x, module) for name, module in others.items()})
    call.projected.update(zip(joined[3:], found.others, strict=True))
    if "g" in joined:
        call.gate_slot = partial(found.room.slot, joined.index("g"))
    call.keep_convolved(convolutions, found.streams, histories, found.y, found.after)
    return True


class ConvolvedProducts(torch.autograd.Function):
    """Products of x, the first three of them convolved; their gradients lie side by side."""

    @staticmethod
    def forward(ctx: Any, found: Convolved, count: int, activated: Any, *given: Any) -> Any:
        from deltarule.ops.fused import short_conv_triton as kernels

        ctx.set_materialize_grads(False)
        x, weights, rest = given[0], given[1 : 1 + count], given[1 + count :]
        (group,), (whole,), outputs = products_of(x, weights)
        found.room.sizes = [x + y for x, y in zip(group.sizes, group.lacking, strict=True)]
        found.streams.extend(outputs[:3])
        y = kernels.short_convs(fused.ShortConvs._make([*outputs[:3], *rest, *activated]))
        ctx.room, ctx.group, ctx.activated, ctx.count = found.room, group, activated, count
        ctx.dtype = weights[0].dtype
        ctx.save_for_backward(x, whole, *outputs[:3], *rest)
        return *y[:3], *outputs[3:], *y[3:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        from deltarule.ops.fused import short_conv_triton as kernels

        x, whole, *given = ctx.saved_tensors
        count = ctx.count
        inputs = fused.ShortConvs._make([*given, *ctx.activated])
        d_all, slots = ctx.room.take(inputs.q)
        pairs = zip(inputs[:3], d_outputs[:3], strict=True)
        d_y = [torch.zeros_like(y) if d is None else d for y, d in pairs]
        # What has been written to its slot is there; no gradient is zeros.
        others = [*zip(d_outputs[3:count], slots[3:], strict=True)]
        beside = [
            (d, slot.flatten(0, -2))
            for d, slot in others
            if d is None or d.data_ptr() != slot.data_ptr()
        ]
        needed = ctx.needs_input_grad[3:]
        wants = needed[count + 4 : count + 7]
        given = *d_y, *d_outputs[count:], *wants, *slots[:3], *chain(*beside)
        found = kernels.short_convs_gradients(inputs, *given)
        parts = [*slots[:3], *[None if d is None else slot for d, slot in others]]
        d_all = d_all.flatten(0, -2)
        needed = needed[: 1 + count], ctx.dtype, d_all
        products = products_back(x, [ctx.group], [whole], parts, *needed)
        return None, None, None, *products, *found[3:], None, None, None
