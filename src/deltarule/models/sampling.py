"""The choice of a token: which tokens may be drawn, and a draw from each row's own numbers."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from deltarule.ops.dispatch import are_plain_eager
from deltarule.ops.fused_kernels import why_not_fused

# Temperatures between which float32 can divide.
SMALLEST, LARGEST = 1.2e-38, 3.4e38
DAMAGED = "the model's logits are NaN or infinite: its parameters are damaged"


class Sampling(NamedTuple):
    """How a token is drawn; see `deltarule.models.generate.generate`."""

    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0


class Draws:
    """Uniform numbers in [0, 1), the same on every device: for row i a stream of seed + i."""

    def __init__(self, seed: int | None, rows: int, device: torch.device) -> None:
        """Seed the stream of every row; the global random state is neither read nor changed."""
        first = torch.Generator().seed() >> 1 if seed is None else seed
        self._generators = [torch.Generator().manual_seed(first + row) for row in range(rows)]
        self._device = device
        # Of each row what was shown and not used.
        self._shown: list[list[float]] = [[] for _ in range(rows)]

    def next(self, rows: list[int]) -> Float[Tensor, "B"]:
        return self.several(rows, 1)[0]

    def several(self, rows: list[int], steps: int) -> Float[Tensor, "steps B"]:
        numbers = [torch.rand(steps, generator=self._generators[r], device="cpu") for r in rows]
        return torch.stack(numbers, dim=1).to(self._device)

    def show(self, row: int, count: int) -> list[float]:
        """Return the next numbers of a row without using them up."""
        shown = self._shown[row]
        new, generator = count - len(shown), self._generators[row]
        shown += torch.rand(new, generator=generator, device="cpu").tolist()
        return shown[:count]

    def use(self, row: int, count: int) -> None:
        del self._shown[row][:count]


def chosen(
    logits: Float[Tensor, "B vocab"],
    draws: Float[Tensor, "B"],
    sampling: Sampling,
    seen: Bool[Tensor, "B vocab"] | None = None,
) -> Int[Tensor, "B"]:
    """One token a row: the likeliest, or the one where the cumulated probability passes u.

    token = the first i, from the likeliest down, with  p_1 + ... + p_i >= u (p_1 + ... + p_size);
    -1 where the largest logit is NaN or infinite. With a temperature of 0 it is the likeliest.
    Logits of tokens that a row has `seen` are divided by the penalty, negative ones multiplied.
    """
    if seen is not None:
        penalty = sampling.repetition_penalty
        moved = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(seen, moved, logits)
    if sampling.temperature == 0:
        return likeliest(logits)
    order, cumulated, size = kept(logits, sampling)
    targets = draws[:, None] * cumulated.gather(1, size - 1)
    # The first place whose sum reaches the target: never past the kept set, never of probability 0.
    # A row of NaN has no such place, and its token is not looked at.
    places = torch.searchsorted(cumulated, targets).clamp(max=cumulated.shape[1] - 1)
    token = order.gather(1, places)[:, 0]
    return torch.where(logits.amax(-1).isfinite(), token, -1)


def likeliest(logits: Float[Tensor, "B vocab"]) -> Int[Tensor, "B"]:
    """The likeliest token of each row, or -1; on a GPU by one kernel."""
    if why_not_fused(logits) is None and are_plain_eager((logits,)):
        # Triton is an extra, imported where it runs.
        from deltarule.ops.fused import likeliest_triton as kernels

        return kernels.likeliest(logits)
    largest, token = logits.max(-1)
    return torch.where(largest.isfinite(), token, -1)


class Kept(NamedTuple):
    """Tokens of each row, the likeliest first, of which the first `size` may be drawn."""

    order: Int[Tensor, "B vocab"]
    cumulated: Float[Tensor, "B top_k"]
    size: Int[Tensor, "B 1"]


def kept(logits: Float[Tensor, "B vocab"], sampling: Sampling) -> Kept:
    """Sort the tokens by probability and count how many of them may be drawn.

    p = softmax(logits / temperature);  the k likeliest, p renormalised;  then the shortest prefix
    with a sum of at least top_p, and of that what has at least min_p times the largest p.
    """
    # The largest becomes 0 before the division, which a small temperature could overflow; one that
    # float32 does not hold would make 0 / 0 of it.
    temperature, top_k, top_p, min_p, _ = sampling
    temperature = min(max(temperature, SMALLEST), LARGEST)
    scaled = (logits.float() - logits.float().amax(-1, keepdim=True)) / temperature
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    limit = logits.shape[-1] if top_k is None else min(top_k, logits.shape[-1])
    probabilities = ordered[:, :limit].softmax(-1)
    cumulated = probabilities.cumsum(-1)
    if top_p is None or top_p == 1:
        size = torch.full_like(order[:, :1], limit)
    else:
        before = F.pad(cumulated[:, :-1], (1, 0))
        # The likeliest stays, however small top_p: it may be 0 in float32.
        size = (before < top_p).sum(-1, keepdim=True).clamp(min=1)
    if min_p is not None:
        size = torch.minimum(size, (ordered >= math.log(min_p)).sum(-1, keepdim=True))
    return Kept(order, cumulated, size)
