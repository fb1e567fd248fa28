"""Training speed of language models of 1.3 billion parameters, ours beside FLA's."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench import adapters
from bench.markdown import markdown_table
from bench.model import Loss, build_fla, build_ours, time_steps
from bench.worker import attempted
from deltarule.models import ModelConfig
from experiments.experiment import Form, Result, read_settings
from experiments.figures import Curve, Figure, Panel, draw_curves, title_of
from experiments.recipes import RECIPES

SETTINGS = read_settings("throughput")["gpu"]
# Tokens of a step, whatever their rows, and of a row.
TOKENS, LENGTHS = SETTINGS["tokens"], tuple(SETTINGS["lengths"])
MODELS = {
    name: RECIPES[row["recipe"]].model if "recipe" in row else ModelConfig(**row)
    for name, row in SETTINGS["models"].items()
}
# The prefix of FLA's classes, and what ours does not decide.
FLA: dict[str, dict[str, Any]] = SETTINGS["fla"]
# One model at a time has the GPU, whatever --workers says.
TIMED = True


@dataclass(frozen=True, kw_only=True)
class ThroughputCell:
    """One model of one package, "deltarule" or "fla", at every length; `system` is its key.

    So many steps are timed, after those that warm up.
    """

    name: str
    peer: str
    system: str
    model: ModelConfig
    tokens: int = TOKENS
    lengths: tuple[int, ...] = LENGTHS
    steps: int = 5
    warm_up: int = 2

    def run(self, folder: Path, device: torch.device) -> dict[str, Any]:
        """Time training steps in bfloat16, forward and backward, without an optimizer.

        `lengths`: for each what `time_steps` returns, or the `error` that ended it.
        """
        return {"lengths": {str(n): self.time(n, str(device)) for n in self.lengths}}

    def build(self, device: str) -> tuple[nn.Module, Loss]:
        if self.peer != "fla":
            return build_ours(self.model, device)
        os.environ.update(adapters.PEERS["fla"].environment)
        theirs = FLA[self.system]
        return build_fla(theirs["prefix"], self.model, theirs["options"], device)

    def time(self, length: int, device: str) -> dict[str, Any]:
        """One length; what does not fit into memory is said to."""
        figures = attempted(lambda: time_steps(
            *self.build(device), vocab_size=self.model.vocab_size, batch=self.tokens // length,
            tokens=length, device=device, steps=self.steps, warm_up=self.warm_up,
        ))  # fmt: skip
        print(f"{self.name}, {length:,} tokens: {figures}", flush=True)
        return figures


def cells(form: Form) -> list[ThroughputCell]:
    whose = {"deltarule": [*MODELS], "fla": [*FLA] if adapters.installed("fla") else []}
    return [
        ThroughputCell(name=f"{peer}-{name}", peer=peer, system=name, model=MODELS[name])
        for peer, names in whose.items()
        for name in names
    ]


def speeds(result: Result) -> dict[int, float]:
    """Thousands of tokens a second by length, of those that ran."""
    rows = result.figures["lengths"].items()
    return {int(n): row["tokens_per_s"] / 1e3 for n, row in rows if "error" not in row}


def draw(form: Form, results: list[Result]) -> Figure:
    panels = []
    x, y = f"tokens in a row, {TOKENS:,} in a step", "thousand tokens a second"
    for peer in ("deltarule", "fla"):
        found = {run.cell["system"]: speeds(run) for run in results if run.cell["peer"] == peer}
        curves = [Curve(name, by) for name, by in found.items() if by]
        if peer == "deltarule":
            given = form["published"]
            curves += [Curve(name, given[name], published=True) for name in found]
        if curves:
            panels.append(Panel(curves, x, y, title=peer, log_x=True))
    return draw_curves(panels, title="Training speed of models of 1.3 B parameters", columns=2)


def table(form: Form, results: list[Result]) -> str:
    rows, reasons = [], []
    for run in results:
        system, found, lengths = run.cell["system"], speeds(run), run.figures["lengths"]
        ran = [row for row in lengths.values() if "error" not in row]
        size = f"{ran[0]['parameters'] / 1e9:.2f} B" if ran else "-"
        memory = f"{max(row['peak_GiB'] or 0 for row in ran):.0f}" if ran else "-"
        each = [
            f"{found[n]:.1f} ({given:g})" if n in found else f"- ({given:g})"
            for n, given in form["published"][system].items()
        ]
        rows.append([title_of(system), run.cell["peer"], size, *each, memory])
        failed = {n: row["error"] for n, row in lengths.items() if "error" in row}
        reasons += [f"- {run.name}, {n}: {error}" for n, error in failed.items()]
    note = "Thousand tokens a second; in brackets those published, on an H100."
    if not any(run.cell["peer"] == "fla" for run in results):
        note += " FLA was not installed: its models are not beside ours."
    head = ["system", "whose", "parameters", *(f"{n:,} x {TOKENS // n}" for n in LENGTHS), "GiB"]
    return "\n\n".join([markdown_table(head, rows), *reasons, note])
