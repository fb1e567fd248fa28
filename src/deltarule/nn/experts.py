"""A mixture of experts: each token goes through the few networks that a router chooses for it.

p = scores(W x)        chosen = the k largest of p + bias
y = sum_e w_e expert_e(x) + shared(x)        expert_e(x) = down_e(SiLU(gate_e x) * up_e x)
"""

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from deltarule.nearest import check_known
from deltarule.nn.checks import above_zero, check_integer, check_that
from deltarule.nn.linears import as_multiplied, weight_of, wide_product
from deltarule.nn.mlp import HiddenActivation, make_mlp
from deltarule.ops.checks import check_flags
from deltarule.ops.dispatch import without_autocast
from deltarule.ops.sequences import computed
from deltarule.shapes import Hidden

Scores = Literal["softmax", "sigmoid"]
# Major versions of GPUs on which PyTorch groups products of bfloat16 without the host.
GROUPED = (9, 10)
# Options of `ModelConfig` and of `Experts` by one name: how a token chooses.
ROUTING = (
    "num_experts", "num_experts_per_tok", "scoring_func", "norm_topk_prob", "n_group", "topk_group",
    "routed_scaling_factor",
)  # fmt: skip
# Added to the sum of the chosen scores; all of them may be zero.
TINY = 1e-20


class Experts(nn.Module):
    """Feed-forward networks, a few of which run for each token.

    Nothing balances the experts in training. A training loop that does adjusts
    `e_score_correction_bias`, which affects only the choice and has no gradient.

    Args:
        hidden_size: Channels of the stream.
        mlp_size: Channels inside an expert.
        num_experts: How many there are.
        num_experts_per_tok: How many each token uses, at most all.
        scoring_func: Scores from the router's logits: "softmax" over all experts, or "sigmoid",
            with a bias that affects only the choice.
        norm_topk_prob: Whether the chosen scores are divided by their sum.
        n_group: Number of equal groups of experts.
        topk_group: Number of groups from which a token may choose: those with the largest sums of
            their two best scores.
        routed_scaling_factor: Factor of the chosen scores.
        shared_size: Channels inside a network that every token uses; 0: none.
        shared_gate: Whether sigmoid of a projection of x multiplies that network's output.
        activation: "silu" with a gate, or "relu2" without, in every one of them.

    Raises:
        ValueError: A size is out of range, or a word is unknown; the message names it.

    Examples:
        >>> Experts(8, 16, num_experts=4, num_experts_per_tok=2)(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])

    Source: arXiv 1701.06538, section 2; sigmoid scores, arXiv 2412.19437, section 2.1.2.
    """

    e_score_correction_bias: Tensor | None
    # The first of the experts whose matrices are here; the others are on other processes.
    first_expert = 0

    def __init__(
        self,
        hidden_size: int,
        mlp_size: int,
        *,
        num_experts: int,
        num_experts_per_tok: int,
        scoring_func: Scores = "softmax",
        norm_topk_prob: bool = True,
        n_group: int = 1,
        topk_group: int = 1,
        routed_scaling_factor: float = 1.0,
        shared_size: int = 0,
        shared_gate: bool = False,
        activation: HiddenActivation = "silu",
    ) -> None:
        super().__init__()
        self.num_experts, self.num_experts_per_tok = num_experts, num_experts_per_tok
        self.norm_topk_prob, self.routed_scaling_factor = norm_topk_prob, routed_scaling_factor
        self.n_group, self.topk_group, self.activation = n_group, topk_group, activation
        self.scoring_func = scoring_func
        sizes = {"hidden_size": hidden_size, "mlp_size": mlp_size, "num_experts": num_experts}
        sizes |= {"num_experts_per_tok": num_experts_per_tok}
        for name, size in (sizes | {"n_group": n_group, "topk_group": topk_group}).items():
            check_integer(name, size, 1)
        check_integer("shared_size", shared_size or 0, 0)
        check_known("scoring_func", scoring_func, get_args(Scores))
        check_known("activation", activation, get_args(HiddenActivation))
        check_flags({"norm_topk_prob": norm_topk_prob, "shared_gate": shared_gate})
        above_zero("routed_scaling_factor", routed_scaling_factor)
        check_routing(self)
        said = "shared_gate must be False without a shared_size"
        check_that(bool(shared_size) or not shared_gate, said, shared_gate)
        self.router = nn.Linear(hidden_size, num_experts, bias=False)
        bias = torch.zeros(num_experts) if scoring_func == "sigmoid" else None
        self.register_buffer("e_score_correction_bias", bias)
        inner = 2 * mlp_size if activation == "silu" else mlp_size
        self.up_proj = nn.Parameter(torch.randn(num_experts, inner, hidden_size))
        self.down_proj = nn.Parameter(torch.randn(num_experts, hidden_size, mlp_size))
        with torch.no_grad():
            self.up_proj.mul_(hidden_size**-0.5)
            self.down_proj.mul_(mlp_size**-0.5)
        self.shared = make_mlp(hidden_size, shared_size, activation) if shared_size else None
        self.shared_gate = nn.Linear(hidden_size, 1, bias=False) if shared_gate else None

    def forward(self, x: Hidden) -> Hidden:
        rows = x.flatten(0, -2)
        weights, chosen = self.route(rows)
        count = len(self.up_proj)
        place = chosen.flatten() - self.first_expert
        if count < self.num_experts:
            # Rows of an expert that is not here come last, and nothing is computed of them.
            elsewhere = (place < 0) | (place >= count)
            place = place.masked_fill(elsewhere, count)
        order = place.argsort(stable=True)
        of_expert = torch.arange(count, device=x.device)
        ends = torch.searchsorted(place[order], of_expert, right=True, out_int32=True)
        rows = as_multiplied(rows)
        given = rows[order // self.num_experts_per_tok]
        if count < self.num_experts:
            given = given.masked_fill(elsewhere[order].unsqueeze(-1), 0)
        inner = grouped_product(given, self.up_proj.to(rows.dtype), ends)
        if self.activation == "silu":
            gate, up = inner.chunk(2, -1)
            inner = F.silu(gate) * up
        else:
            inner = F.relu(inner).square()
        # Each token's experts side by side again: summed in one order, whatever else is there.
        y = grouped_product(inner, self.down_proj.to(rows.dtype), ends)[order.argsort()]
        if count < self.num_experts:
            y = y.masked_fill(elsewhere.unsqueeze(-1), 0)
        y = y.unflatten(0, (-1, self.num_experts_per_tok))
        y = (y * weights.unsqueeze(-1).to(y.dtype)).sum(1).to(x.dtype).view_as(x)
        if self.shared is None:
            return y
        shared: Tensor = self.shared(x)
        if self.shared_gate is not None:
            shared = torch.sigmoid(self.shared_gate(x)) * shared
        return y + shared

    @property
    def waits(self) -> bool:
        """Whether the host has to know on a GPU how many rows each expert has."""
        up, down = self.up_proj, self.down_proj
        on_device = up.dtype == torch.bfloat16 and is_grouped(up) and is_grouped(down)
        return not on_device or torch.cuda.get_device_capability(up.device)[0] not in GROUPED

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts of rows [N, hidden_size] and their weights, [N, k] each."""
        weight = weight_of(self.router)
        logits = self.called_router(rows) if weight is None else wide_product(rows, weight)
        scores = logits.softmax(-1) if self.scoring_func == "softmax" else logits.sigmoid()
        choice = scores.detach()
        if self.e_score_correction_bias is not None:
            choice = choice + self.e_score_correction_bias
        if self.n_group > 1:
            grouped = choice.unflatten(-1, (self.n_group, -1))
            best = grouped.topk(2, -1)[0].sum(-1).topk(self.topk_group, -1)[1]
            hidden = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
            choice = grouped.masked_fill(hidden.unsqueeze(-1), -torch.inf).flatten(-2)
        chosen = choice.topk(self.num_experts_per_tok, -1)[1]
        weights = scores.gather(-1, chosen)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        return weights * self.routed_scaling_factor, chosen

    def called_router(self, rows: Tensor) -> Tensor:
        """One that is more than a product, in float32 as the product is: no hook moves a choice."""
        wide = {n: computed(p) for n, p in self.router.named_parameters() if p.is_floating_point()}
        with without_autocast(rows.device):
            logits: Tensor = functional_call(self.router, wide, computed(rows))
        return logits


def check_routing(options: Any) -> None:
    """Refuse numbers, of a layer or a model, by which no token could choose its experts."""
    experts, groups = options.num_experts, options.n_group
    check_that(experts % groups == 0, f"n_group must divide num_experts={experts}", groups)
    said = f"topk_group must be at most n_group={groups}"
    check_that(options.topk_group <= groups, said, options.topk_group)
    most, chosen = experts // groups * options.topk_group, options.num_experts_per_tok
    said = f"num_experts_per_tok must be at most {most}, the experts a token can choose"
    check_that(chosen <= most, said, chosen)
    few = groups > 1 and experts < 2 * groups
    check_that(not few, "n_group must leave two experts or more in a group", groups)


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x_r W_e^T for the rows r of expert e: [R, O] of x [R, I], W [E, O, I] and ends [E].

    What stands in rows after the last expert's is anything.
    """
    if is_grouped(weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    last = ends.tolist()
    parts = zip(weight.unbind(), [0, *last[:-1]], last, strict=True)
    found = [F.linear(x[start:end], matrix) for matrix, start, end in parts]
    return torch.cat([*found, x.new_zeros(len(x) - last[-1], weight.shape[1])])


def is_grouped(weight: Tensor) -> bool:
    """PyTorch's grouped product takes rows of 16 bytes, no float64, and compiled only bfloat16."""
    whole = all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])
    other = weight.dtype == torch.float64 or torch.compiler.is_compiling()
    return whole and (weight.dtype == torch.bfloat16 or not other)
