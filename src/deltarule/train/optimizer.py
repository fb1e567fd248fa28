"""AdamW on the tensors that decay, AdamW without decay on the rest, and a schedule for the rate."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deltarule.nn import parameter_roles
from deltarule.nn.checks import check_least, check_that


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW and its learning rate."""

    lr: float = 3e-3
    """Peak learning rate, reached at the end of the warm-up."""
    min_lr_ratio: float = 0.1
    """The cosine ends at this fraction of the peak."""
    warmup_steps: int = 100
    """Steps of linear growth to the peak."""
    start_lr_ratio: float = 0.0
    """The warm-up starts at this fraction of the peak."""
    weight_decay: float = 0.1
    """Decay of matrices; gates, norms and biases have none."""
    decay_embeddings: bool = False
    """Let embeddings decay like matrices; a tied head then decays with them."""
    beta1: float = 0.9
    """Memory of AdamW's mean of gradients."""
    beta2: float = 0.95
    """Memory of AdamW's mean of squared gradients."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 never clips."""

    def __post_init__(self) -> None:
        check_least(self, 0, "lr", "min_lr_ratio", "warmup_steps", "start_lr_ratio")
        check_least(self, 0, "weight_decay", "eps", "clip")
        ratio = self.start_lr_ratio
        check_that(ratio <= 1, "start_lr_ratio must be at most 1", ratio)
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            check_that(0 <= beta < 1, f"{name} must lie in [0, 1)", beta)


def learning_rate(step: int, steps: int, options: OptimizerOptions) -> float:
    r"""The rate of a step from 0: a linear warm-up, then half a cosine.

    .. math::
        \mathrm{lr}(s) = \mathrm{lr} \min\!\left(f + (1 - f) \tfrac{s + 1}{W},\;
            m + (1 - m) \tfrac{1 + \cos \pi x}{2}\right), \qquad x = \tfrac{s + 1 - W}{S - W}

    of a run of S steps with the options' peak, warm-up W, first ratio f and final ratio m.
    """
    # A run shorter than its warm-up still has to reach its peak: it warms up for a tenth.
    warmup = options.warmup_steps if options.warmup_steps < steps else steps // 10
    if step < warmup:
        grown = (step + 1) / warmup
        return options.lr * (grown + options.start_lr_ratio * (1 - grown))
    progress = min(1.0, (step + 1 - warmup) / max(1, steps - warmup))
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return options.lr * (options.min_lr_ratio + (1 - options.min_lr_ratio) * cosine)


def decays(model: nn.Module, *, decay_embeddings: bool = False) -> dict[str, bool]:
    """Which parameters weight decay applies to, by name.

    It applies to matrices by `deltarule.nn.parameter_roles`: not to gates, scales of norms, biases
    and learned starts, nor, unless asked for, to embeddings and heads tied to them.
    """
    decayed = {"matrix", "embedding"} if decay_embeddings else {"matrix"}
    return {name: role in decayed for name, role in parameter_roles(model).items()}


def make_optimizer(model: nn.Module, options: OptimizerOptions) -> torch.optim.AdamW:
    """Fused AdamW with and without decay.

    On a GPU it can be captured as a CUDA graph, and its rate is a tensor.
    """
    table = decays(model, decay_embeddings=options.decay_embeddings)
    alike: dict[Any, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        # A fused AdamW takes no group of parameters of a mesh and others.
        layout = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None)
        alike.setdefault((table[name], layout), []).append(parameter)
    groups = [
        {"params": part, "weight_decay": options.weight_decay if decayed else 0.0}
        for (decayed, _), part in sorted(alike.items(), key=lambda item: not item[0][0])
    ]
    device = next(model.parameters()).device
    captured = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        groups, lr=torch.tensor(options.lr, device=device) if captured else options.lr,
        betas=(options.beta1, options.beta2), eps=options.eps, fused=True, capturable=captured,
    )  # fmt: skip
    # It is capturable in eager steps, too, so that both have the same bits: no warning of that.
    optimizer._warned_capturable_if_run_uncaptured = True
    return optimizer


# Added to the norm that clips, as `torch.nn.utils.clip_grad_norm_` does.
EPSILON = 1e-6


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            kinds.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    # In 16 bits the norm itself would have three digits.
    wide = functools.reduce(torch.promote_types, kinds, torch.float32)
    # One pass over all of a dtype.
    norms = [x for kind in kinds.values() for x in torch._foreach_norm(kind, 2, wide)]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
