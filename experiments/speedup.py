"""How much faster chunks are than a loop over tokens: on a GPU kernels, on a CPU the definition."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import timing
from bench.cases import OPERATIONS, Shape, Tensors
from bench.cases import draw as draw_inputs
from bench.markdown import markdown_table
from deltarule.doctor.bars import relative_rms
from deltarule.ops import delta_rule
from deltarule.ops.dispatch import Impl
from experiments.experiment import Form, Result
from experiments.figures import Curve, Figure, Panel, draw_curves
from experiments.seeds import told

PASSES = {"forward": "forward", "both": "forward and backward"}
# Both compute the same in different orders, from inputs that are rounded alike.
MOST_DIFFERENT = {"cpu": 1e-4, "cuda": 3e-2}
# One cell at a time has the machine, whatever --workers says.
TIMED = True


@dataclass(frozen=True, kw_only=True)
class SpeedupCell:
    """One head dimension at every length of a row, batch times length constant.

    `head` are channels of a key and of a value, `width` those of all heads together, `tokens` those
    of all rows; of `repeats` timed runs the median counts.
    """

    name: str
    head: int
    width: int
    tokens: int
    lengths: tuple[int, ...]
    repeats: int

    def run(self, folder: Path, device: torch.device) -> dict[str, Any]:
        """Time both forms at each length, if they compute the same.

        `lengths`: for each, milliseconds `chunks_forward`, `chunks_both`, `loop_forward` and
        `loop_both`, and `difference`, the largest relative difference of an output or gradient.
        """
        # The loop over tokens gains nothing from a second thread, and the chunks have none either.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return {"lengths": {str(n): self.time(n, device) for n in self.lengths}}
        finally:
            torch.set_num_threads(threads)

    def time(self, length: int, device: torch.device) -> dict[str, float]:
        """In turns on the CPU, in CUDA graphs on a GPU."""
        inputs, grad = self.draw(length, device)
        cpu = device.type == "cpu"
        sides: dict[str, timing.Operator] = {
            "chunks": by_library, "loop": by_definition if cpu else by_kernels
        }  # fmt: skip
        found = [timing.outputs(side, inputs, grad).values() for side in sides.values()]
        difference = max(map(relative_rms, *found))
        if not difference < MOST_DIFFERENT[device.type]:
            raise ValueError(
                f"the loop and the chunks must compute the same, and differ by {difference:.1e} at "
                f"{length} tokens and heads of {self.head}"
            )
        runs: dict[str, timing.Run] = {
            f"{name}_{kind}": partial(
                timing.outputs, side, inputs, grad if kind == "both" else None
            )
            for name, side in sides.items()
            for kind in PASSES
        }
        if cpu:
            seconds = timing.interleaved_seconds(runs, self.repeats)
            times = {name: 1e3 * statistics.median(some) for name, some in seconds.items()}
        else:
            times = {name: timing.graph_ms([run], self.repeats) for name, run in runs.items()}
        print(f"heads of {self.head}, {length:,} tokens: {times}", flush=True)
        return times | {"difference": difference}

    def draw(self, length: int, device: torch.device) -> tuple[Tensors, Tensor]:
        """q, k, v and beta, with unit q and k, and the gradient of o; 16 bits on a GPU."""
        heads = self.width // self.head
        shape = Shape("", self.tokens // length, length, heads, heads, self.head, self.head)
        inputs = draw_inputs(OPERATIONS["delta"], shape, device=str(device))
        if device.type == "cpu":
            inputs = {name: x.float() for name, x in inputs.items()}
        return inputs, torch.randn_like(inputs["v"])


def by_library(x: Mapping[str, Any], impl: Impl = "auto") -> Tensor:
    return delta_rule(**x, return_state=False, impl=impl).o


by_definition = partial(by_library, impl="reference")


def by_kernels(x: Mapping[str, Any]) -> Tensor:
    # Its file needs Triton.
    from experiments.token_kernels import token_by_token

    return token_by_token(x["q"], x["k"], x["v"], x["beta"])


def cells(form: Form) -> list[SpeedupCell]:
    sizes = form["cell"] | {"lengths": tuple(form["lengths"])}
    return [SpeedupCell(name=f"head-{head}", head=int(head), **sizes) for head in form["published"]]


def ratios(result: Result, kind: str) -> dict[int, float]:
    """Times of the loop over those of the chunks, by length."""
    return {
        int(length): row[f"loop_{kind}"] / row[f"chunks_{kind}"]
        for length, row in result.figures["lengths"].items()
    }


def draw(form: Form, results: list[Result]) -> Figure:
    """A panel for each pass; the published figure is of both."""
    panel = partial(Panel, x="tokens in a row", y="times faster than the loop", log_x=True)
    panels = []
    for kind, title in PASSES.items():
        curves = [Curve(f"heads of {run.cell['head']}", ratios(run, kind)) for run in results]
        if both := kind == "both":
            published = form["published"].items()
            curves += [Curve(f"heads of {n}", given, published=True) for n, given in published]
        panels.append(panel(curves, title=title, log_y=both, levels={"as fast": 1.0}))
    return draw_curves(panels, title="Chunks beside a loop over tokens", columns=2)


def table(form: Form, results: list[Result]) -> str:
    rows = []
    for run in results:
        size, forward = str(run.cell["head"]), ratios(run, "forward")
        for length, ratio in ratios(run, "both").items():
            row = run.figures["lengths"][str(length)]
            figures = row["chunks_both"], row["loop_both"], ratio, forward[length]
            shape = [size, f"{length:,}", str(run.cell["tokens"] // length)]
            published = told(form["published"][size], length)
            rows.append([*shape, *(f"{x:.2f}" for x in figures), published])
    head = ["head", "tokens in a row", "batch", "chunks, ms", "loop, ms", "times faster"]
    return markdown_table([*head, "forward alone", "published"], rows)
