"""Word problems of groups against the writes for each token, and weights that are exact."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.markdown import markdown_table
from deltarule.tasks.groups import Config, Group, running_products
from deltarule.train.labelled import Curriculum
from experiments.constructions import Action, Construction
from experiments.experiment import Form, Result
from experiments.figures import Curve, Figure, Panel, draw_curves
from experiments.seeds import Runs, by_setting, first_evaluation
from experiments.task_cell import Evaluation, TaskCell, task_cell

LABEL, ROWS = "new rows", 1000
# Rows grow from two elements on: products of few have to be learned before those of many.
FIRST_LENGTH, THRESHOLD = 2, 0.25


@dataclass(frozen=True)
class ExactCell:
    """A layer whose weights are not trained, on one long row."""

    name: str
    group: Group
    action: Action
    tokens: int = 20_000
    seed: int = 0

    def run(self, folder: Path, device: torch.device) -> dict[str, Any]:
        """Multiply in float64 on the CPU, and compare with the table of products."""
        construction = Construction(self.group, self.action)
        order = len(construction.matrices)
        words = np.random.default_rng(self.seed).integers(order, size=self.tokens)
        run = construction.run(words)
        right = (run.products == running_products(self.group, words[None])[0]).mean()
        return {"n_steps": construction.n_steps, "accuracy": float(right), "error": run.error}


def cells(form: Form) -> list[TaskCell | ExactCell]:
    # Write strengths up to 2 have eigenvalues in [-1, 1], up to 1 in [0, 1].
    settings = [(group, n, 2.0) for group, steps in form["groups"].items() for n in steps]
    settings += [(group, n, 1.0) for group, steps in form["positive"].items() for n in steps]
    trained = [make_cell(form, *one, seed) for one in settings for seed in form["seeds"]]
    return trained + [ExactCell(f"exact-{group}-{by}", group, by) for group, by in form["exact"]]


def make_cell(form: Form, group: Group, n_steps: int, beta_max: float, seed: int) -> TaskCell:
    """One layer of DeltaProduct with four heads, no convolution, no gate and no MLP."""
    prefixes = tuple(form["prefixes"])
    return task_cell(
        TaskCell, form, f"{group}-n{n_steps}-from{1 - int(beta_max)}-seed{seed}",
        Config(group, form["trained"]),
        [Evaluation(LABEL, Config(group, prefixes[-1]), ROWS, prefixes=prefixes)], seed=seed,
        model={"beta_max": beta_max, "n_steps": n_steps},
        cell={"curriculum": Curriculum(FIRST_LENGTH, form["trained"], THRESHOLD)},
    )  # fmt: skip


def trained_runs(results: Sequence[Result], group: Group) -> dict[str, list[Result]]:
    """Training runs of a group by label, every seed of each; fewest writes first."""
    runs: dict[str, list[Result]] = {}
    for name, seeds in sorted(by_setting(results).items()):
        if name.startswith(f"{group}-"):
            model = seeds[0].cell["model"]
            runs[f"n = {model['n_steps']}{'' if model['beta_max'] > 1 else ', [0, 1]'}"] = seeds
    return runs


def shares(run: Result) -> dict[int, float]:
    return dict(map(tuple, first_evaluation(run)["prefixes"]))


def draw(form: Form, results: list[Result]) -> Figure:
    """A panel for each group: the share of rows that are right up to each length.

    A curve for each seed, as they differ in kind: some solve a group that others do not.
    """
    panels = []
    marks = {"longest in training": form["trained"]}
    panel = partial(Panel, x="elements", y="rows right up to here", log_x=True, marks=marks)
    for group in reversed(form["groups"]):
        curves = [
            Curve(label, shares(run), look=label.partition(",")[0])
            for label, runs in trained_runs(results, group).items()
            for run in runs
        ]
        if group == "S_5":
            theirs = form["published"].items()
            curves += [Curve(f"n = {n}", points, published=True) for n, points in theirs]
        panels.append(panel(curves, title=group, limits=(-0.02, 1.05)))
    return draw_curves(panels, title="Word problems of groups", columns=2)


def table(form: Form, results: list[Result]) -> str:
    lengths, rows = (form["trained"], form["prefixes"][-1]), []
    for group in reversed(form["groups"]):
        for label, runs in trained_runs(results, group).items():
            found = [shares(run) for run in runs]
            right = [Runs([one[n] for one in found]).each(".3f") for n in lengths]
            half = [max((n for n, x in one.items() if x >= 0.5), default=0) for one in found]
            rows.append([group, label, *right, Runs(half).each("d")])
    head = ["group", "writes", f"rows right up to {lengths[0]}", f"up to {lengths[1]}"]
    learned = markdown_table([*head, "length with half of the rows right"], rows)

    done, rows = {run.name: run for run in results}, []
    for group, action in form["exact"]:
        if run := done.get(f"exact-{group}-{action}"):
            of, tokens = run.figures, f"{run.cell['tokens']:,}"
            exact = [str(of["n_steps"]), tokens, f"{of['accuracy']:.1%}", f"{of['error']:.0e}"]
            rows.append([group, action, *exact])
    head = ["group", "acts by", "writes", "tokens", "right", "largest error"]
    titles = "Learned, each seed:", "Exact weights, without training, in float64:"
    return "\n\n".join([titles[0], learned, titles[1], markdown_table(head, rows)])
