r"""MAD: six small tasks that tell layers apart; table 1 of DeltaNet, at its baseline settings.

"compression" goes through an autoencoder around any layer: a row of tokens into one vector, and
back.

    e     = encoder(tokens)[T]                        the state of the stream at the last token
    x_t   = decoder(e + p_t)        t = 1, ..., T     p_t: sines and cosines of the position
    decoder(x) = norm(gelu(W_2 norm(gelu(W_1 norm(x)))))

The encoder is a `CausalLM`, whose head reads x_t instead of the stream. Source: the backbone of the
MAD benchmark (arXiv 2403.17844).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bench.markdown import markdown_table
from deltarule.models import CausalLM, ModelConfig
from deltarule.nn import ModelState
from deltarule.ops.context import Context
from deltarule.shapes import Hidden, Mask, Offsets
from deltarule.tasks import load_task
from experiments.experiment import Form, Result
from experiments.figures import Curve, Figure, Panel, draw_curves, in_training, title_of
from experiments.seeds import accuracy, first_evaluation
from experiments.task_cell import Evaluation, TaskCell, task_cell

LABEL, ROWS = "new rows", 1280
WAVELENGTHS = 10_000.0


class Autoencoder(CausalLM):
    """A model that says each token again after it has read all; hidden_size is even, 4 or more."""

    def __init__(self, config: ModelConfig) -> None:
        """Build encoder and decoder; their weights come from the global random state."""
        size = config.hidden_size
        super().__init__(config)
        self.decoder = nn.Sequential(
            nn.LayerNorm(size), nn.Linear(size, size), nn.GELU(), nn.LayerNorm(size),
            nn.Linear(size, size), nn.GELU(), nn.LayerNorm(size),
        )  # fmt: skip

    def hidden(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        *,
        cu_seqlens: Offsets | None = None,
        mask: Mask | None = None,
        context: Context | None = None,
    ) -> tuple[Hidden, ModelState]:
        """What the head reads at each position; the arguments are those of `CausalLM.hidden`."""
        x, state = super().hidden(tokens, state, cu_seqlens=cu_seqlens, mask=mask, context=context)
        places = positions(x.shape[1], x.shape[2], x.device)
        return self.decoder(x[:, -1:] + places), state


def positions(length: int, size: int, device: torch.device) -> Tensor:
    """Sines, then cosines of each position, [length, size], from wavelength 2 pi up."""
    steps = torch.arange(size // 2, device=device) / (size // 2 - 1)
    waves = torch.exp(-math.log(WAVELENGTHS) * steps)
    angles = torch.arange(length, device=device)[:, None] * waves
    return torch.cat([angles.sin(), angles.cos()], dim=1)


@dataclass(frozen=True, kw_only=True)
class AutoencoderCell(TaskCell):
    """One small autoencoder on one task, whose labels are the tokens themselves."""

    def build(self) -> CausalLM:
        return Autoencoder(self.model)


def measured(task: Form) -> Any:
    """A task's configuration in the test."""
    return load_task(task["task"]).Config(**task.get("config", {}))


def cells(form: Form) -> list[TaskCell]:
    return [make_cell(form, name, layer) for name in form["tasks"] for layer in form["layers"]]


def make_cell(form: Form, name: str, layer: str) -> TaskCell:
    """One model of two blocks, mixer and MLP; in some tasks every next token is a lesson."""
    task = form["each"] | form["tasks"][name]
    config = training = measured(task)
    if hasattr(config, "training"):
        training = replace(config, training=True)
    every = task["steps"] // form["evaluations"]
    return task_cell(
        AutoencoderCell if task["task"] == "mad_compression" else TaskCell,
        form, f"{name}-{layer}", training, [Evaluation(LABEL, config, ROWS)],
        model={"layer_types": layer, "conv_size": 0 if layer in form["no_convolution"] else 4},
        loop={"steps": task["steps"], "evaluate_every": every},
        cell={"task": task["task"], "rows": task["rows"], "examples": task.get("examples")},
    )  # fmt: skip


def of_task(form: Form, name: str, results: list[Result]) -> dict[str, Result]:
    done = {result.name: result for result in results}
    return {layer: run for layer in form["layers"] if (run := done.get(f"{name}-{layer}"))}


def draw(form: Form, results: list[Result]) -> Figure:
    """Accuracy in training, a panel a task; the published scores at its end."""
    panels, given = [], form["published"]
    for name, task in form["tasks"].items():
        runs, last = of_task(form, name, results), task.get("steps", form["each"]["steps"])
        curves = [in_training(layer, result) for layer, result in runs.items()]
        curves += [
            Curve(layer, {last: given[layer][name] / 100}, published=True)
            for layer in runs
            if layer in given
        ]
        levels, limits = {"chance": measured(task).chance}, (-0.08, 1.05)
        title = task["title"]
        panels.append(Panel(curves, "step", "accuracy", title, limits=limits, levels=levels))
    return draw_curves(panels, title="MAD, baseline settings")


def table(form: Form, results: list[Result]) -> str:
    rows = []
    for name, task in form["tasks"].items():
        for layer, result in of_task(form, name, results).items():
            right = first_evaluation(result)["share_right"]
            published = form["published"].get(layer, {})
            theirs = f"{published[name]:.1f} %" if name in published else "-"
            ours = [f"{accuracy(result):.1%}", f"{right:.2%}", f"{result.figures['steps']:,}"]
            rows.append([task["title"], title_of(layer), *ours, theirs])
    head = ["task", "layer", "accuracy", "answers right", "steps", "published mean of all settings"]
    return markdown_table(head, rows)
