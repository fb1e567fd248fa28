"""Projections to try a rule on, and the rule run on them by the definition."""

import torch
from torch import Tensor

from deltarule.nn.rule import Projections, Rule
from deltarule.ops.delta_rule import definition

B, T, H, HV, K, V = 2, 9, 2, 4, 5, 3
OPERATORS = {"delta_rule": definition.delta_rule, "dplr": definition.dplr}


def draw(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64)


def draw_projections(n_steps: int = 1, heads: int = H, **others: object) -> Projections:
    """q, k and v [B, T*n, heads, K or V] of unit size, and whatever else is named."""
    q, k = draw(B, T, heads, K), draw(B, T * n_steps, heads, K)
    return Projections(q=q, k=k, v=draw(B, T * n_steps, HV, V), n_steps=n_steps, **others)


def run(rule: Rule, projections: Projections) -> Tensor:
    """o [B, T, HV, V] by the rule."""
    output = OPERATORS[rule.operator](**rule.arguments(projections))
    return rule.read_out_function(output.o, projections)


def each_head(*per_value_head: Tensor | None):
    """Yield (batch row, value head, its key head) and their slices [T, ...] of the tensors."""
    for row in range(B):
        for head in range(HV):
            slices = [x if x is None else x[row, :, head] for x in per_value_head]
            yield row, head, head * H // HV, *slices


def largest_error(o: Tensor, expected: Tensor) -> float:
    return ((o - expected).abs().max() / expected.abs().max()).item()
