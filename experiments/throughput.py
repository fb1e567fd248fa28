"""Training speed of language models of 1.3 billion parameters, ours beside FLA's."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from bench import adapters
from bench.markdown import markdown_table
from bench.model import Loss, build_fla, build_ours, time_steps
from bench.worker import reason
from deltarule.models import ModelConfig
from experiments.experiment import Result
from experiments.figures import Curve, Panel, draw_curves, title_of
from experiments.recipes import RECIPES
from experiments.words import Form

# Tokens of a step, whatever their rows.
TOKENS = 32_768
LENGTHS = (2048, 4096, 8192, 16_384)


class Fla(NamedTuple):
    """FLA's model of one system: the prefix of its classes, and what ours does not decide."""

    prefix: str
    options: dict[str, Any]


# The sizes of fla-hub/gla-1.3B-100B and of state-spaces/mamba2-1.3b, which have no recipe.
DELTANET = RECIPES["deltanet_1b3"].model
GLA = dataclasses.replace(DELTANET, layer_types="gla", num_heads=4, norm_eps=1e-5)
MAMBA2 = dataclasses.replace(GLA, layer_types="mamba2", num_layers=48, num_heads=64, mlp_size=0)
MODELS = {
    "attention": RECIPES["transformer_1b3"].model, "deltanet": DELTANET,
    "gated_deltanet": RECIPES["gated_deltanet_1b3"].model, "gla": GLA, "mamba2": MAMBA2,
    "gated_deltanet_h1": RECIPES["gated_deltanet_h1_1b3"].model,
    "gated_deltanet_h2": RECIPES["gated_deltanet_h2_1b3"].model,
}  # fmt: skip
GATED = {"num_heads": 9, "expand_v": 2}
WINDOWS = {"layers": list(range(1, 18, 2)), "num_heads": 18, "window_size": 2048}
FLA = {
    "attention": Fla("Transformer", {"num_heads": 32}),
    "deltanet": Fla("DeltaNet", {"num_heads": 16, "use_gate": False}),
    "gated_deltanet": Fla("GatedDeltaNet", GATED | {"head_dim": 200}),
    "mamba2": Fla("Mamba2", {"head_dim": 64, "state_size": 128, "expand": 2}),
    "gla": Fla("GLA", {"num_heads": 4}),
    "gated_deltanet_h1": Fla("GatedDeltaNet", GATED | {"head_dim": 192, "attn": WINDOWS}),
}
# One model at a time has the GPU, whatever --workers says.
TIMED = True


@dataclass(frozen=True, kw_only=True)
class ThroughputCell:
    """One model of one package at every length."""

    name: str
    peer: str
    """Whose: "deltarule" or "fla"."""
    system: str
    """Key in `MODELS`, and in `FLA`."""
    model: ModelConfig
    """Its sizes."""
    tokens: int = TOKENS
    """Of a step, whatever their rows."""
    lengths: tuple[int, ...] = LENGTHS
    """Tokens of a row."""
    steps: int = 5
    """That are timed."""
    warm_up: int = 2
    """Steps before those."""

    def run(self, folder: Path, device: torch.device) -> dict[str, Any]:
        """Time training steps in bfloat16, forward and backward, without an optimizer.

        `lengths`: for each what `time_steps` returns, or the `error` that ended it.
        """
        return {"lengths": {str(n): self.time(n, str(device)) for n in self.lengths}}

    def build(self, device: str) -> tuple[nn.Module, Loss]:
        """The model, and its loss from text to a number."""
        if self.peer != "fla":
            return build_ours(self.model, device)
        os.environ.update(adapters.PEERS["fla"].environment)
        theirs = FLA[self.system]
        return build_fla(theirs.prefix, self.model, theirs.options, device)

    def time(self, length: int, device: str) -> dict[str, Any]:
        """One length; what does not fit into memory is said to."""
        try:
            figures = time_steps(
                *self.build(device), vocab_size=self.model.vocab_size, batch=self.tokens // length,
                tokens=length, device=device, steps=self.steps, warm_up=self.warm_up,
            )  # fmt: skip
        except Exception as error:
            figures = {"error": reason(error)}
        print(f"{self.name}, {length:,} tokens: {figures}", flush=True)
        if device != "cpu":
            torch.cuda.empty_cache()
        return figures


def cells(form: Form) -> list[ThroughputCell]:
    """All models of ours, then those of FLA where it is installed."""
    ours = [("deltarule", name) for name in MODELS]
    theirs = [("fla", name) for name in FLA] if adapters.installed("fla") else []
    return [
        ThroughputCell(name=f"{peer}-{name}", peer=peer, system=name, model=MODELS[name])
        for peer, name in (*ours, *theirs)
    ]


def speeds(result: Result) -> dict[int, float]:
    """Thousands of tokens a second by length, of those that ran."""
    rows = result.figures["lengths"].items()
    return {int(n): row["tokens_per_s"] / 1e3 for n, row in rows if "error" not in row}


def draw(form: Form, results: list[Result], path: Path) -> None:
    """A panel for each package, the published figures in ours."""
    panels = []
    x, y = f"tokens in a row, {TOKENS:,} in a step", "thousand tokens a second"
    for peer in ("deltarule", "fla"):
        runs = [run for run in results if run.cell["peer"] == peer]
        found = {run.cell["system"]: speeds(run) for run in runs}
        curves = [Curve(name, [*by], [*by.values()]) for name, by in found.items() if by]
        if peer == "deltarule":
            curves += [Curve.of_paper(name, form["published"][name]) for name in found]
        if curves:
            panels.append(Panel(curves, x, y, title=peer, log_x=True))
    draw_curves(panels, path, title="Training speed of models of 1.3 B parameters", columns=2)


def table(form: Form, results: list[Result]) -> str:
    """Thousands of tokens a second, and the published ones behind them."""
    head = ["system", "whose", "parameters", *(f"{n:,} x {TOKENS // n}" for n in LENGTHS), "GiB"]
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
    return "\n\n".join([markdown_table(head, rows), *reasons, note])
