"""The few parts of layers that see all heads: norms over them, products with them, their numbers.

Split by heads, each needs one more sum over the processes, or to know which heads it has.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from deltarule.nn.experts import Experts
from deltarule.nn.frame import Frame
from deltarule.nn.norm import ACTIVATIONS, Activation, GroupRMSNorm
from deltarule.nn.rule import Arguments, Projections, Rule
from deltarule.nn.scan_mixer import ScanMixer
from deltarule.parallel.local import Group, sum_over_ranks


def span_heads(local: nn.Module, whole: nn.Module, mesh: DeviceMesh) -> None:
    """Make the layer with some of the heads compute what the layer with all of them does."""
    group = mesh.get_group()
    if isinstance(whole, Frame) and isinstance(local, Frame):
        # Attention has none.
        norm = getattr(whole, "o_norm", None)
        centred = isinstance(norm, nn.LayerNorm)
        if centred or whole.norm_of_all or (isinstance(norm, GroupRMSNorm) and norm.groups == 1):
            kind = SpanningLayerNorm if centred else SpanningRMSNorm
            local.o_norm = kind(local.o_norm, whole.gate_activation, mesh.size(), group)
    if isinstance(whole, Experts) and isinstance(local, Experts):
        local.first_expert = mesh.get_local_rank() * (whole.num_experts // mesh.size())
    if isinstance(whole, ScanMixer):
        # q, k and the step sizes, where there are any, are products with the values of all heads.
        for name in ("q_proj", "k_proj", "a_proj.0", "b_proj.0"):
            owner, _, last = name.rpartition(".")
            parent = dict(local.named_modules()).get(owner)
            product = getattr(parent, last, None)
            if isinstance(parent, nn.Module) and isinstance(product, nn.Linear):
                sizes = product.in_features, product.out_features
                summed = SpanningLinear(*sizes, bias=False, device="meta")
                summed.weight, summed.group = product.weight, group
                parent.register_module(last, summed)
    rule = getattr(whole, "rule", None)
    if isinstance(rule, Rule) and rule.decay == "constant":
        local.rule = own_constants(rule, mesh)  # type: ignore[assignment]


class SpanningRMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) * activation(gate), the mean that of all processes."""

    def __init__(self, norm: Any, activation: Activation, ways: int, group: Group) -> None:
        super().__init__()
        self.weight, self.eps, self.activation = norm.weight, norm.eps, activation
        self.ways, self.group = ways, group

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = wide * torch.rsqrt(self._mean(wide.square()) + self.eps)
        y = y.to(x.dtype) * self.weight.to(x.dtype)
        return y if gate is None else y * ACTIVATIONS[self.activation](gate)

    def _mean(self, x: Tensor) -> Tensor:
        total = sum_over_ranks(x.sum(-1, keepdim=True), self.group)
        return total / (x.shape[-1] * self.ways)


class SpanningLayerNorm(SpanningRMSNorm):
    """y = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias, over all processes' channels."""

    def __init__(self, norm: Any, activation: Activation, ways: int, group: Group) -> None:
        super().__init__(norm, activation, ways, group)
        self.bias = norm.bias

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return super().forward(wide - self._mean(wide)).to(x.dtype) + self.bias.to(x.dtype)


class SpanningLinear(nn.Linear):
    """A product with all processes' channels: each multiplies its own, and they are summed."""

    group: Group

    def forward(self, x: Tensor) -> Tensor:
        return sum_over_ranks(super().forward(x), self.group)


def own_constants(rule: Rule, mesh: DeviceMesh) -> Rule:
    """Return the rule whose constant decays are those of this process's heads among all."""

    def arguments(projections: Projections) -> Arguments:
        mapped = rule.arguments(projections)
        all_heads = projections.v.shape[2] * mesh.size()
        like_whole = projections.v.new_empty(1, 1, all_heads, 1)
        constants = rule.arguments(dataclasses.replace(projections, v=like_whole))
        own: Any = constants["log_decay"].chunk(mesh.size())[mesh.get_local_rank()]
        return mapped | {"log_decay": own}

    return dataclasses.replace(rule, arguments=arguments)
