"""The operators beside the recurrence, each as a fused and a plain form of the same map."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.models import loss
from deltarule.nn import norm, short_conv
from deltarule.nn.embedding import Embedded
from deltarule.nn.layout import Layout, make_layout
from deltarule.ops.delta_rule import gate_logits
from deltarule.ops.fused import cross_entropy
from deltarule.ops.fused import gates as gates_op
from deltarule.ops.fused import norms as norm_op
from deltarule.ops.fused import short_conv as conv_op
from deltarule.ops.fused import swiglu as swiglu_op
from deltarule.ops.operators import direct

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Neighbour:
    """One map in two forms, and what both are given of the tensors that have gradients.

    `wide` names the tensors that stay in float32 with 16-bit inputs.
    """

    tensors: Tensors
    given: Callable[[Tensors], tuple]
    fused_form: Callable[..., object]
    plain_form: Callable[..., object]
    wide: tuple[str, ...] = ()

    def fused(self, x: Tensors) -> tuple[Tensor, ...]:
        return outputs_of(self.fused_form(*self.given(x)))

    def plain(self, x: Tensors) -> tuple[Tensor, ...]:
        return outputs_of(self.plain_form(*self.given(x)))

    def to(self, dtype: torch.dtype, device: str = "cpu") -> "Neighbour":
        """The inputs in another dtype, float32 at least for parameters, or on another device."""
        moved = {
            name: x.to(device, torch.promote_types(dtype, torch.float32) if name in self.wide
                       else dtype)
            for name, x in self.tensors.items()
        }  # fmt: skip
        return replace(self, tensors=moved)


def outputs_of(found: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def offsets(lengths: tuple[int, ...], x: Tensor) -> Tensor:
    return torch.tensor([0, *lengths], device=x.device).cumsum(0)


def conv(
    taps: int = 4, tokens: int = 37, channels: int = 12, *, lengths: tuple[int, ...] | None = None,
    padded: bool = False, activated: bool = True, sliced: bool = False,
    fresh: bool = False,
) -> Neighbour:  # fmt: skip
    """The short convolution, as the layer calls it."""
    tokens = tokens if lengths is None else sum(lengths)
    batch = 2 if lengths is None else 1
    sequences = batch if lengths is None else len(lengths)
    mask = torch.rand(batch, tokens) < 0.6 if padded else None
    if mask is not None:
        # Fewer real tokens than the window holds.
        mask[0, 2:] = False

    def given(x: Tensors) -> tuple:
        y = x["x"][..., 1 : channels + 1] if sliced else x["x"]
        packed = None if lengths is None else offsets(lengths, y)
        layout = make_layout(y, packed, None if mask is None else mask.to(y.device))
        return layout.to_front(y), x["weight"], x.get("history"), layout, activated

    tensors = {
        "x": torch.randn(batch, tokens, channels + 3 * sliced),
        "weight": torch.randn(channels, taps),
        "history": torch.randn(sequences, taps - 1, channels),
    }
    if fresh:
        del tensors["history"]
    return Neighbour(tensors, given, short_conv.fused_convolution, plain_convolution, ("weight",))


def plain_convolution(
    x: Tensor, weight: Tensor, history: Tensor | None, layout: Layout, activated: bool
) -> tuple[Tensor, Tensor]:
    if history is None:
        history = x.new_zeros(layout.sequences, weight.shape[1] - 1, x.shape[2])
    return short_conv.plain_convolution(x, weight, history, layout, activated)


def three_convs(fresh: bool = False, alike: bool = False) -> Neighbour:
    """The convolutions of packed q, k and v of other widths, of which k may have no SiLU."""
    lengths = 5, 0, 1, 20
    widths, activated = {"q": 6, "k": 130, "v": 9}, (True, alike, True)
    tensors = {name: torch.randn(1, sum(lengths), size) for name, size in widths.items()}
    tensors |= {f"{name} weight": torch.randn(size, 4) for name, size in widths.items()}
    if not fresh:
        before = {name: torch.randn(len(lengths), 3, size) for name, size in widths.items()}
        tensors |= {f"{name} history": x for name, x in before.items()}

    def given(x: Tensors) -> tuple:
        each = [(x[n], x[f"{n} weight"], x.get(f"{n} history")) for n in widths]
        return each, make_layout(x["q"], offsets(lengths, x["q"]), None)

    def fused(each: list, layout: Layout) -> tuple[Tensor, ...]:
        parts = [y for part in zip(*each, strict=True) for y in part]
        return conv_op.short_convs(*parts, *short_conv.packing(layout), *activated)

    def plain(each: list, layout: Layout) -> tuple[Tensor, ...]:
        pairs = zip(each, activated, strict=True)
        y, after = zip(*[plain_convolution(*own, layout, on) for own, on in pairs], strict=True)
        return *y, *after

    return Neighbour(tensors, given, fused, plain, tuple(f"{name} weight" for name in widths))


def gated_norm(
    size: int = 20, activation: norm.Activation | None = "silu", *, sliced: bool = False,
    zero_centered: bool = False,
) -> Neighbour:  # fmt: skip
    """The gated norm of each head, of a slice of a wider projection too."""
    shape = (2, 5, 3, size)

    def given(x: Tensors) -> tuple:
        y = x["x"][..., 1:].unflatten(-1, shape[2:]) if sliced else x["x"]
        return y, x.get("gate"), x["weight"], 1e-5, activation or "silu", zero_centered

    tensors = {
        "x": torch.randn(2, 5, 3 * size + 1) if sliced else torch.randn(shape),
        "weight": torch.randn(size),
    }
    if activation:
        tensors["gate"] = torch.randn(shape)
    return Neighbour(tensors, given, norm_op.gated_norm, norm.plain_gated_norm, ("weight",))


def residual_norm(size: int = 20, *, sliced: bool = False, alone: bool = False) -> Neighbour:
    """The stream with a branch added, and the norm of the sum; or the norm alone."""
    tensors = {
        "x": torch.randn(2, 11, size), "y": torch.randn(2, 11, size + sliced),
        "weight": torch.randn(size),
    }  # fmt: skip
    forms = (
        lambda *x, run=run: run(*x)[alone:]
        for run in (norm_op.residual_norm, norm.plain_residual_norm)
    )
    return Neighbour(
        tensors, lambda x: (x["x"], x["y"][..., sliced:], x["weight"], 1e-5), *forms, ("weight",)
    )


def embedding(vocabulary: int = 20, size: int = 37, tokens: int = 70) -> Neighbour:
    """Rows of a weight, some of them many times and the last never."""
    places = torch.randint(vocabulary - 1, (3, tokens))
    places[0] = 0
    return Neighbour(
        {"weight": torch.randn(vocabulary, size)},
        lambda x: (x["weight"], places.to(x["weight"].device)),
        lambda weight, there: direct(Embedded)(weight, there),
        lambda weight, there: F.embedding(there, weight),
    )


def swiglu(size: int = 37, *, sliced: bool = False) -> Neighbour:
    """SiLU of one projection times another, halves of a wider one too."""
    return Neighbour(
        {"both": 3 * torch.randn((3, 29, 2 * size) if sliced else (2, 3, 29, size))},
        lambda x: x["both"].chunk(2, -1) if sliced else x["both"].unbind(),
        swiglu_op.swiglu, lambda gate, up: F.silu(gate) * up,
    )  # fmt: skip


def decay(channels: int | None, *, step: bool = False, spread: float = 3.0) -> Neighbour:
    """The decay of each head, or of each key channel, and the step size of Mamba-2."""
    sizes = (3,) if channels is None else (3, channels)
    tensors = {
        "logits": spread * torch.randn(2, 9, *sizes),
        "A_log": torch.randn(3),
        "dt_bias": torch.randn(sizes),
    }
    return Neighbour(
        tensors, lambda x: (x["logits"], x["A_log"], x["dt_bias"]),
        lambda *x: gates_op.log_decay(*x, step)[::-1][not step :],
        lambda *x: gate_logits.step_and_log_decay(*x)[not step :], ("A_log", "dt_bias"),
    )  # fmt: skip


def both_gates(channels: int | None = None) -> Neighbour:
    """A decay and a write strength, whose logits are columns of one projection."""
    size, beta_max = 3 * (channels or 1), 2.0
    sizes = (3,) if channels is None else (3, channels)
    tensors = {"logits": 3 * torch.randn(2, 9, size + 3)}
    tensors |= {"A_log": torch.randn(3), "dt_bias": torch.randn(sizes)}

    def given(x: Tensors) -> tuple:
        decays, strengths = x["logits"].split([size, 3], -1)
        return decays.unflatten(-1, sizes), x["A_log"], x["dt_bias"], strengths, beta_max

    def plain(*x: Tensor) -> tuple[Tensor, Tensor]:
        return gate_logits.step_and_log_decay(*x[:3])[1], gate_logits.write_strength(*x[3:])

    return Neighbour(tensors, given, gates_op.gates, plain, ("A_log", "dt_bias"))


def strength(beta_max: float = 2.0) -> Neighbour:
    """The write strength, of a slice of a wider projection."""
    tensors, of = {"logits": 3 * torch.randn(2, 9, 5)}, lambda x: (x["logits"][..., 1:4], beta_max)
    return Neighbour(tensors, of, gates_op.write_strength, gate_logits.write_strength)


def entropy(vocab: int = 50, *, linear: bool = False) -> Neighbour:
    """The loss of logits, or of hidden channels and a head."""
    targets = torch.randint(vocab, (23,))
    targets[:4] = -100

    def fused(x: Tensor, *weight: Tensor) -> Tensor:
        placed = targets.to(x.device)
        if not linear:
            return loss._run_triton(cross_entropy.CrossEntropy(x, placed, -100))
        options = placed, -100, x.dtype, True, True
        return cross_entropy.linear_cross_entropy(x, *weight, *options)

    def plain(x: Tensor, *weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, *weight) if linear else x, targets.to(x.device))

    tensors = {"x": 3 * torch.randn(23, vocab)}
    if linear:
        tensors = {"x": torch.randn(23, 8), "weight": torch.randn(vocab, 8)}
    return Neighbour(tensors, lambda x: tuple(x.values()), fused, plain)


PACKED = (5, 0, 1, 20, 0, 9, 3, 0)
MAKERS: dict[str, Callable[[], Neighbour]] = {
    "conv": conv,
    "conv of 1": lambda: conv(1),
    "conv of 2": lambda: conv(2, channels=130),
    "conv of 3, one token": lambda: conv(3, tokens=1),
    "conv of 6, linear": lambda: conv(6, activated=False),
    "conv, sliced": lambda: conv(sliced=True),
    "conv, packed": lambda: conv(lengths=PACKED),
    "conv, all empty": lambda: conv(lengths=(0, 0)),
    "conv, padded": lambda: conv(padded=True),
    "conv, fresh": lambda: conv(fresh=True),
    "conv, fresh, few tokens": lambda: conv(tokens=2, padded=True, fresh=True),
    "conv, fresh, packed": lambda: conv(lengths=PACKED, fresh=True),
    "three convs": three_convs,
    "three convs, fresh": lambda: three_convs(fresh=True),
    "three convs in one launch": lambda: three_convs(alike=True),
    "norm": gated_norm,
    "norm, sigmoid, sliced": lambda: gated_norm(17, "sigmoid", sliced=True),
    "norm without gate": lambda: gated_norm(300, None),
    "norm in three parts": lambda: gated_norm(96),
    "norm less one": lambda: gated_norm(17, None, zero_centered=True),
    "norm less one in three parts": lambda: gated_norm(96, zero_centered=True),
    "residual norm": residual_norm,
    "residual norm, sliced": lambda: residual_norm(300, sliced=True),
    "residual norm, no sum": lambda: residual_norm(17, alone=True),
    "residual norm in three parts": lambda: residual_norm(48),
    "embedding": embedding,
    "embedding of many": lambda: embedding(600, 5),
    "swiglu": swiglu,
    "swiglu, sliced": lambda: swiglu(130, sliced=True),
    "head decay": lambda: decay(None),
    "head decay and step": lambda: decay(None, step=True, spread=15.0),
    "channel decay": lambda: decay(90),
    "write strength": strength,
    "head decay and strength": both_gates,
    "channel decay and strength": lambda: both_gates(90),
    "cross entropy": entropy,
    "cross entropy of many": lambda: entropy(5000),
    "linear cross entropy": lambda: entropy(linear=True),
}


def with_gradients(
    run: Callable[[Tensors], tuple[Tensor, ...]], tensors: Tensors, weights: list[Tensor]
) -> tuple[list[Tensor], Tensors]:
    """The outputs, and the gradients of sum(weight * output)."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    outputs = list(run(leaves))
    given = [w.to(x.device, x.dtype) for w, x in zip(weights, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), given, allow_unused=True)
    found = {
        name: torch.zeros_like(x) if gradient is None else gradient
        for (name, x), gradient in zip(leaves.items(), gradients, strict=True)
    }
    return [x.detach() for x in outputs], found
