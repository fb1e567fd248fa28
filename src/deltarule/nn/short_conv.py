"""A short causal convolution over time, one filter for each channel, then SiLU.

y_t = SiLU(sum_{j=0..W-1} weight_j * x_{t-W+1+j} + bias)
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule.nn.layout import Layout
from deltarule.nn.linears import is_hooked
from deltarule.ops.dispatch import are_plain_eager
from deltarule.ops.fused import short_conv as fused
from deltarule.ops.fused_kernels import kernel_runs, why_not_fused

# Of as many outputs, or of a part of them, each program of a product has those of one stream.
OUTPUTS = 128
# Tokens whose products stay in a cache until they are summed.
PART = 128


class ShortConv(nn.Module):
    """Depthwise causal convolution, followed by SiLU.

    Args:
        channels: Channels D, each with its own filter.
        size: Taps W, at least 1; the last weighs the token itself.
        activated: Whether SiLU follows.
        bias: Whether each channel has a bias, which begins at zero.

    Examples:
        >>> from deltarule.nn.layout import make_layout
        >>> convolution, x = ShortConv(8), torch.randn(2, 5, 8)
        >>> y, history = convolution(x, None, make_layout(x, None, None))
        >>> y.shape, history.shape  # of the next tokens in place of None
        (torch.Size([2, 5, 8]), torch.Size([2, 3, 8]))
    """

    bias: nn.Parameter | None

    def __init__(
        self, channels: int, size: int = 4, activated: bool = True, bias: bool = False
    ) -> None:
        super().__init__()
        self.register_parameter("bias", nn.Parameter(torch.zeros(channels)) if bias else None)
        self.activated = activated
        self.weight = nn.Parameter(torch.empty(channels, size).uniform_(-(size**-0.5), size**-0.5))

    def init_history(self, sequences: int) -> Tensor:
        """Zeros [N, R, D]: what comes before a sequence's first token."""
        weight = self.weight
        return weight.new_zeros(sequences, weight.shape[1] - 1, weight.shape[0])

    def forward(self, x: Tensor, history: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
        """Convolve x [B, T, D] after history [N, R, D] or zeros; return y and the next history.

        `layout` is what `make_layout` says of x and its padding.
        """
        return short_convolution(x, self.weight, history, layout, self.activated, self.bias)


def short_convolution(
    x: Tensor, weight: Tensor, history: Tensor | None, layout: Layout, activated: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y [B, T, D] of x with taps [D, W] after history [N, R, D], and the next history."""
    if not kernel_runs(x, why_not_fused(x) or too_many(weight)):
        if history is not None:
            return plain_convolution(x, weight, history, layout, activated, bias)
        history = x.new_zeros(layout.sequences, weight.shape[1] - 1, x.shape[2])
        if layout.cu_seqlens is not None:
            return plain_convolution(x, weight, history, layout, activated, bias)
        # Rows that start from zeros are not copied behind them.
        y = finished(convolve(x, weight, bias, before=history.shape[1]), activated)
        return y, layout.next_history(x, history)
    # A bias comes between the taps and SiLU, which the kernel has as one.
    y, after = fused_convolution(x, weight, history, layout, activated and bias is None)
    return y if bias is None else finished(y + bias.to(y.dtype), activated), after


def finished(y: Tensor, activated: bool) -> Tensor:
    return F.silu(y) if activated else y


def fused_convolution(
    x: Tensor, weight: Tensor, history: Tensor | None, layout: Layout, activated: bool
) -> tuple[Tensor, Tensor]:
    """One kernel, which keeps the taps in float32 and rounds once."""
    history = None if history is None else history.to(x.dtype)
    y, after = fused.short_conv(x, weight, history, *packing(layout), activated)
    return y, after


def packing(layout: Layout) -> tuple[Tensor | None, ...]:
    counts = None if layout.real is None else layout.counts
    return layout.cu_seqlens, layout.sequence, counts


def convolved(
    modules: Sequence[nn.Module], streams: Sequence[Tensor], histories: Sequence[Tensor | None],
    layout: Layout,
) -> tuple[tuple[Tensor, ...], list[Tensor]]:  # fmt: skip
    """All y and next histories of q, k and v: in one call, where kernels convolve all three."""
    if not all(map(is_fused, modules, streams)):
        each = zip(modules, streams, histories, strict=True)
        found, after = zip(*[module(x, h, layout) for module, x, h in each], strict=True)
        return found, list(after)
    pairs = zip(histories, streams, strict=True)
    before = [None if h is None else h.to(x.dtype) for h, x in pairs]
    taps = [(module._parameters["weight"], module.activated) for module in modules]
    weights, activated = zip(*taps, strict=True)
    outputs = fused.short_convs(*streams, *weights, *before, *packing(layout), *activated)
    return outputs[:3], list(outputs[3:])


def is_fused(module: Any, x: Tensor) -> bool:
    """Whether a call of the module is a kernel on x and nothing more."""
    if type(module) is not ShortConv or is_hooked(module):
        return False
    # From its table: a Python function answers `module.weight`.
    own: Any = module._parameters
    return own["bias"] is None and (why_not_fused(x) or too_many(own["weight"])) is None


def plain_convolution(
    x: Tensor, weight: Tensor, history: Tensor, layout: Layout, activated: bool,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """PyTorch's own operations, on rows that begin with their history."""
    reach = weight.shape[1] - 1
    extended = layout.with_history(x, history)
    if extended.shape[1] == weight.shape[1] and layout.real is None:
        # One token for each row: fewer passes than taps.
        y = (extended * weight.mT.to(x.dtype)).sum(1, keepdim=True)
        y = y if bias is None else y + bias.to(y.dtype)
        return finished(y, activated), extended[:, 1:].clone()
    y = layout.without_history(convolve(extended, weight, bias), reach)
    return finished(y, activated), layout.next_history(x, history)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, before: int = 0) -> Tensor:
    """y [B, S + before - W + 1, D] of x [B, S, D], which comes after so many zeros."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    plain = are_plain_eager([given for given in (x, weight, bias) if given is not None])
    if not plain or torch.autograd.forward_ad._current_level >= 0 or not torch.is_grad_enabled():
        return shifted_sums(x, weight, bias, before)
    y: Tensor = Convolution.apply(x, weight, bias, before)  # type: ignore[no-untyped-call]
    return y


def shifted_sums(x: Tensor, weight: Tensor, bias: Tensor | None, before: int) -> Tensor:
    """The same, by shifted multiply-adds, the last tap's first.

    No transpose to the channels-first layout of conv1d, which costs more than the arithmetic saves
    for a few taps. The channels of a tap lie side by side, as vectors of a processor want them.
    """
    *others, last = weight.mT.contiguous().unbind()
    newest = x[:, len(others) - before :]
    y = newest * last if bias is None else torch.addcmul(bias, newest, last)
    steps = shifts(x, len(others), y.shape[1], before)
    for tap, (to, inputs) in zip(others, steps, strict=True):
        (y[:, to:] if to else y).addcmul_(inputs, tap)
    return y


def shifts(x: Tensor, taps: int, tokens: int, before: int) -> Iterator[tuple[int, Tensor]]:
    """For each tap, its first output and the inputs that it weighs."""
    for tap in range(taps):
        to, start = max(before - tap, 0), max(tap - before, 0)
        yield to, x[:, start : start + max(tokens - to, 0)]


class Convolution(torch.autograd.Function):
    """`shifted_sums`, whose gradient by x is one sum, not one for each tap and their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, before: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.before = before
        return shifted_sums(x, weight, bias, before)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dx_s = sum_j weight_j dy_{s-j}, dweight_j = sum_t dy_t x_{t+j}: both can be derived."""
        x, weight = ctx.saved_tensors
        dx, d_taps, d_bias = None, None, None
        if ctx.needs_input_grad[0]:
            dx = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
            taps = weight.mT.contiguous().unbind()
            steps = shifts(dx, len(taps), dy.shape[1], ctx.before)
            for tap, (to, into) in zip(taps, steps, strict=True):
                into.addcmul_(dy[:, to:], tap)
        if ctx.needs_input_grad[1]:
            pairs = shifts(x, weight.shape[1], dy.shape[1], ctx.before)
            d_taps = torch.stack([part_sums(dy[:, to:], inputs) for to, inputs in pairs], 1)
        if ctx.needs_input_grad[2]:
            d_bias = dy.sum((0, 1))
        return dx, d_taps, d_bias, None


def part_sums(x: Tensor, y: Tensor) -> Tensor:
    """sum over B and T of x y, rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = zip(x.split(PART, 1), y.split(PART, 1), strict=True)
    return torch.stack([(a * b).sum((0, 1), dtype=wide) for a, b in parts]).sum(0).to(x.dtype)


def too_many(weight: Tensor) -> str | None:
    taps, most = weight.shape[1], fused.MAX_TAPS
    return f"the Triton kernel takes up to {most} taps, got {taps}" if taps > most else None


def can_step(
    modules: Sequence[ShortConv], streams: Sequence[Tensor], histories: Sequence[Tensor]
) -> bool:
    """Whether one kernel convolves the few tokens of three streams and their histories in place."""
    if not all(map(is_fused, modules, streams)):
        return False
    weights = [module.weight for module in modules]
    if not are_plain_eager((*streams, *histories, *weights)):
        return False
    pairs, taps = zip(streams, histories, strict=True), {weight.shape[1] for weight in weights}
    rows = all(x.dtype == h.dtype and x.stride(-1) == 1 for x, h in pairs)
    whole = all(x.is_contiguous() for x in (*weights, *histories))
    return rows and whole and len(taps) == 1 < min(taps)


def at_once(
    modules: Sequence[Any], streams: Sequence[Tensor], histories: Sequence[Any], layout: Layout
) -> tuple[tuple[Tensor, ...], list[Tensor]] | None:
    """One token of streams convolved alike, as of one: operations are dearer than its numbers."""
    if any(type(module) is not ShortConv or is_hooked(module) for module in modules):
        return None
    weights = [module._parameters["weight"] for module in modules]
    each = zip(modules, weights, streams, histories, strict=True)
    kinds = {(m.activated, w.shape[1], x.dtype, h is None) for m, w, x, h in each}
    biased = any(module._parameters["bias"] is not None for module in modules)
    if len(kinds) > 1 or biased or histories[0] is None:
        return None
    if not are_plain_eager((*streams, *histories, *weights)):
        return None
    x, history = torch.cat([*streams], 2), torch.cat([*histories], 2)
    weight, sizes = torch.cat(weights), [stream.shape[2] for stream in streams]
    y, after = plain_convolution(x, weight, history, layout, modules[0].activated)
    return y.split_with_sizes(sizes, 2), list(after.split_with_sizes(sizes, 2))


def within_product(modules: Sequence[Any], histories: Sequence[Tensor], x: Tensor) -> Any:
    """Convolutions for the product that makes q, k and v of x [B, 1, I] itself, or None."""
    even = all(len(module.weight) % OUTPUTS == 0 for module in modules)
    if not even or len({module.activated for module in modules}) > 1:
        return None
    if not can_step(modules, [x] * len(modules), histories):
        return None
    from deltarule.ops.fused.convolution_step_triton import Within

    weights = tuple(module.weight for module in modules)
    return Within(weights, tuple(histories), modules[0].activated)


def step_in_place(
    modules: Sequence[ShortConv], streams: Sequence[Tensor], histories: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Convolve three streams [B, T, D] after their histories [B, R, D], which are overwritten."""
    # Triton is an extra, imported where it runs.
    from deltarule.ops.fused.convolution_step_triton import Stream, convolution_step

    q, k, v = (
        Stream(x, module.weight, history, module.activated)
        for module, x, history in zip(modules, streams, histories, strict=True)
    )
    return convolution_step((q, k, v))
