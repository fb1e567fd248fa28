"""Each rule's state as an associative memory, filled past what it can hold.

Pairs are written one a token, S_t = S_{t-1} A_t + w_t k_t^T, and then every key is asked for its
value: the error is |S k_i - v_i|^2 / |v_i|^2, so that an empty memory, which answers 0, scores 1.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from bench.markdown import markdown_table
from deltarule.ops import delta_rule, mesa
from experiments.experiment import Form, Result
from experiments.figures import Curve, Figure, Panel, draw_curves, title_of

# Of keys' squared length, the part along a direction that all of them share.
SHARED = 0.5
# RetNet's first head; the gated delta rule gets the same, so that the erase alone differs.
LOG_DECAY = math.log1p(-(2.0**-5))
# Weight of the penalty on the size of the least squares' map.
REGULARIZER = 1e-3
# The number of pairs whose errors are drawn by age, in widths.
FULL = 2
# Writes that share a mark in that figure.
BIN = 8


class Memory(NamedTuple):
    """What is written in order, and what each key should give in the end; [..., tokens, width]."""

    keys: Tensor
    values: Tensor
    asked: Tensor
    answers: Tensor


CONDITIONS = {
    "random": "Random keys",
    "correlated": "Keys that share half of their length",
    "overwritten": "Every key written a second time",
}


def written(condition: str, pairs: int, width: int, seed: int) -> Memory:
    """Unit keys and values in float64: independent directions, or keys with one in common.

    Those that are overwritten are written with values of before, and then with those that count.
    """
    rng = np.random.default_rng(seed)

    def directions(count: int) -> Tensor:
        return normalize(torch.from_numpy(rng.standard_normal((count, width))), dim=-1)

    keys = directions(pairs)
    if condition == "correlated":
        keys = normalize(math.sqrt(1 - SHARED) * keys + math.sqrt(SHARED) * directions(1), dim=-1)
    before = directions(pairs) if condition == "overwritten" else keys[:0]
    values = directions(pairs)
    return Memory(torch.cat([keys[: len(before)], keys]), torch.cat([before, values]), keys, values)


@dataclass(frozen=True)
class MemoryCell:
    """One rule, a key in `deltarule.nn.SYSTEMS`, under every condition.

    The state is a square; there is a memory for each seed and each number of pairs.
    """

    name: str
    width: int
    pairs: tuple[int, ...]
    seeds: tuple[int, ...]

    def run(self, folder: Path, device: torch.device) -> dict[str, Any]:
        """Write and read.

        Returns:
            For each condition, by the number of pairs and then by seed, `error`, a mean over keys,
            and `found`, the share of keys whose answer is nearer to their own value than
            to any other that was written; and of random
            keys `by_age`, the mean error of what was written 0, 1, 2 ... writes ago.
        """
        figures: dict[str, Any] = {"pairs": list(self.pairs)}
        for condition in CONDITIONS:
            scores = [self.scores(condition, pairs, device) for pairs in self.pairs]
            figures[condition] = {
                "error": [error.mean(-1).tolist() for error, _ in scores],
                "found": [found.mean(-1).tolist() for _, found in scores],
            }
        error, _ = self.scores("random", FULL * self.width, device)
        return figures | {"by_age": error.mean(0).flip(0).tolist()}

    def scores(self, condition: str, pairs: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Error of each key, and whether its own value is the nearest; both [seeds, pairs]."""
        drawn = [written(condition, pairs, self.width, seed) for seed in self.seeds]
        memory = Memory(*(torch.stack(part).to(device) for part in zip(*drawn, strict=True)))
        answers = recall(self.name, memory)
        error = (answers - memory.answers).square().sum(-1)
        # Values of before are among those that an answer may be nearest to.
        nearest = torch.cdist(answers, memory.values).argmin(-1)
        right = memory.values.shape[1] - pairs + torch.arange(pairs, device=device)
        return error, (nearest == right).double()


def recall(rule: str, memory: Memory) -> Tensor:
    """What the state answers to each key asked for, by the library's operator.

    Tokens that ask write nothing: their keys and values are zero, and nothing decays at them.
    """
    asked, count = torch.zeros_like(memory.asked), memory.keys.shape[1]
    parts = (
        (torch.zeros_like(memory.keys), memory.asked), (memory.keys, asked), (memory.values, asked),
    )  # fmt: skip
    q, k, v = (torch.cat(part, dim=1)[:, :, None] for part in parts)
    ones = k.new_ones(k.shape[:3])
    if rule == "mesa":
        penalty = REGULARIZER * k.new_ones(1, k.shape[-1])
        o = mesa(q, k, v, beta=ones, regularizer=penalty, iterations=None, scale=1.0).o
    else:
        beta = ones if "deltanet" in rule else None
        decay = LOG_DECAY * (k != 0).any(-1).to(k.dtype)
        log_decay = decay if rule in ("retnet", "gated_deltanet") else None
        o = delta_rule(q, k, v, beta=beta, log_decay=log_decay, scale=1.0).o
    return o[:, count:, 0]


def cells(form: Form) -> list[MemoryCell]:
    pairs, seeds = tuple(form["pairs"]), tuple(range(form["seeds"]))
    return [MemoryCell(rule, form["width"], pairs, seeds) for rule in form["rules"]]


def draw(form: Form, results: list[Result]) -> Figure:
    panel, width = partial(Panel, y="relative squared error", levels={"empty": 1.0}), form["width"]
    against_pairs = partial(
        panel, log_x=True, log_y=True, limits=(1e-3, 1e2), marks={"channels of a key": width}
    )
    panels = []
    for condition, title in CONDITIONS.items():
        curves = []
        for one in results:
            errors = zip(one.figures["pairs"], one.figures[condition]["error"], strict=True)
            curves.append(Curve.through(one.name, dict(errors)))
        x = "keys, each written twice" if condition == "overwritten" else "pairs, each written once"
        panels.append(against_pairs(curves, x, title=title))
    middles = [first + (BIN - 1) / 2 for first in range(0, FULL * width, BIN)]
    by_age = []
    for one in results:
        errors = np.reshape(one.figures["by_age"], (-1, BIN)).mean(1).tolist()
        by_age.append(Curve(one.name, dict(zip(middles, errors, strict=True))))
    panels.append(panel(by_age, "writes since", title=f"Random keys, {FULL * width} pairs, by age"))
    return draw_curves(panels, title="What a 64 x 64 state remembers", columns=2)


def table(form: Form, results: list[Result]) -> str:
    columns = form["columns"]
    rows = [[title_of(one.name), *(scored(one, *column) for column in columns)] for one in results]
    return markdown_table(["rule", *("{}, {}".format(*column) for column in columns)], rows)


def scored(result: Result, condition: str, pairs: int) -> str:
    at = result.figures["pairs"].index(pairs)
    error, found = (np.array(result.figures[condition][name][at]) for name in ("error", "found"))
    return f"{error.mean():.2g} ({error.min():.2g} to {error.max():.2g}), {found.mean():.0%} found"
