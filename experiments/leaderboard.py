"""The leaderboard: every system of the library on the same tasks, at the same settings.

A cell is one system on one task: one seed at each learning rate, then further seeds at the best of
them. Each is stored on its own, so the table grows system by system and task by task.
"""

import json
import math
import shutil
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.markdown import markdown_table
from deltarule.nn import SYSTEMS
from deltarule.tasks import load_task
from deltarule.train.figures import DARK, dress, new_figure
from experiments import mad
from experiments.experiment import Form, Result, one_line, read_settings
from experiments.figures import Figure, title_of
from experiments.records import write_json
from experiments.seeds import first_evaluation
from experiments.task_cell import Evaluation, TaskCell, task_cell
from experiments.text_cell import TextCell, bits, text_cells, text_model

MAD = read_settings("mad")["gpu"]
# Scores this near are one: of tasks, whose tests have 1,000 rows, and of text.
TIE = {False: 0.1, True: 0.02}
# A task is solved above this.
SOLVED = 0.99
# Inches of a panel and of a system's line in it, and panels beside each other.
WIDTH, LINE, ACROSS = 4.4, 0.17, 4
UNIT = {False: "scaled accuracy", True: "bits per byte"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One system on one task."""

    name: str
    first: TaskCell | TextCell
    """At the first rate and seed."""
    rates: tuple[float, ...]
    """Tried with the first seed."""
    seeds: tuple[int, ...]
    """Run at the best rate."""

    def run(self, folder: Path, device: torch.device) -> dict[str, Any]:
        """Choose the rate, then run all seeds at it.

        `rate`; `scores` of all seeds at it; `tried`, the first seed's score at each rate; `steps`
        and `parameters` of the runs at the best one, and `training_seconds` of all.
        """
        tried = {rate: self.trained(rate, self.seeds[0], folder, device) for rate in self.rates}
        sign = -1 if isinstance(self.first, TextCell) else 1
        rate = max(self.rates, key=lambda one: sign * self.score(tried[one]))
        further = [self.trained(rate, seed, folder, device) for seed in self.seeds[1:]]
        runs = [tried[rate], *further]
        return {
            "rate": rate,
            "scores": [self.score(run) for run in runs],
            "tried": {f"{one:g}": self.score(run) for one, run in tried.items()},
            "steps": [run["steps"] for run in runs],
            "parameters": runs[0]["parameters"],
            "training_seconds": sum(run["training_seconds"] for run in [*tried.values(), *further]),
        }

    def trained(self, rate: float, seed: int, folder: Path, device: torch.device) -> dict[str, Any]:
        own = folder / f"lr{rate:g}-seed{seed}"
        found = own / "figures.json"
        if not found.exists():
            cell = replace(at_rate(self.first, rate), loop=replace(self.first.loop, seed=seed))
            write_json(found, cell.run(own, device))
            shutil.rmtree(own / "checkpoints", ignore_errors=True)
        return json.loads(found.read_text(encoding="utf-8"))

    def score(self, figures: dict[str, Any]) -> float:
        """Bits per byte of text; of a task the accuracy, scaled so that guessing is 0, all is 1."""
        run = Result(self.name, {}, figures)
        if isinstance(self.first, TextCell):
            return bits(run)
        chance: float = self.first.evaluations[0].config.chance
        return (float(first_evaluation(run)["accuracy"]) - chance) / (1 - chance)


def at_rate(cell: TaskCell | TextCell, rate: float) -> TaskCell | TextCell:
    return replace(cell, optimizer=replace(cell.optimizer, lr=rate))


def cells(form: Form) -> list[Entry]:
    found = []
    for key, column in form["columns"].items():
        rates, seeds = tuple(column["rates"]), tuple(column["seeds"])
        for system in SYSTEMS:
            first = at_rate(first_cell(key, column, system), rates[0])
            found.append(Entry(name=f"{system}-{key}", first=first, rates=rates, seeds=seeds))
    return found


def first_cell(key: str, form: Form, system: str) -> TaskCell | TextCell:
    """A system's training run at the first seed, sizes of heads and convolution its own."""
    if key == "language":
        return text_cells({system: text_model(system, "large")}, "large", (0,))[0]
    steps = form["steps"]
    if key.startswith("mad-"):
        # The model and the rows of the experiment `mad`, for fewer steps and with warm-up.
        cell = mad.make_cell(MAD, key.removeprefix("mad-"), system)
        return replace(
            cell,
            model=replace(cell.model, conv_size=None, head_k_dim=None, head_v_dim=None),
            optimizer=replace(cell.optimizer, warmup_steps=steps // 10, beta2=0.98, clip=1.0),
            loop=replace(cell.loop, steps=steps, evaluate_every=steps // 5, save_every=steps),
        )
    config = load_task(form["task"]).Config
    training, tested = config(**form["training"]), config(**form["tested"])
    each = {"evaluate_every": steps // 6, "save_every": steps, "keep": 1}
    whole = {
        "model": {"layer_types": system, "tie_embeddings": False} | form["model"],
        "optimizer": {"min_lr_ratio": 0.05, "warmup_steps": steps // 10, "beta2": 0.98},
        "loop": {"steps": steps, "dtype": form.get("dtype", "float32")} | each,
        "cell": {"task": form["task"], "rows": form["rows"], "stop_at": 0.999},
    }
    return task_cell(TaskCell, whole, system, training, [Evaluation("new rows", tested, 1000)])


class Scored(NamedTuple):
    """What is known of one system on one task: the scores of its seeds, of text less is better."""

    system: str
    scores: list[float]
    lower: bool

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)


def board_of(form: Form, results: list[Result]) -> dict[str, list[Scored]]:
    """All systems on each task that has any, the best mean first."""
    done = {result.name: result.figures["scores"] for result in results}
    board = {}
    for key in form["columns"]:
        lower = key == "language"
        names = {system: done.get(f"{system}-{key}") for system in SYSTEMS}
        found = [Scored(system, scores, lower) for system, scores in names.items() if scores]
        if found:
            board[key] = sorted(found, key=lambda one: one.mean, reverse=not lower)
    return board


def bands(ranked: list[Scored]) -> dict[str, int]:
    """The band of each system: one begins where the best seed is clearly below the leader's."""
    told: dict[str, int] = {}
    band, worst = 0, math.inf
    for one in ranked:
        signed = [-x if one.lower else x for x in one.scores]
        if not band or max(signed) < worst - TIE[one.lower]:
            band, worst = band + 1, min(signed)
        told[one.system] = band
    return told


def table(form: Form, results: list[Result]) -> str:
    """A row for each system and a column for each task that anything has run; then the settings.

    Systems come by the mean of their bands over the tasks that they have run.
    """
    made, board = form["columns"], board_of(form, results)
    placed = {key: bands(ranked) for key, ranked in board.items()}
    cells = {
        (one.system, key): told(one, placed[key]) for key, ranked in board.items() for one in ranked
    }

    def place(system: str) -> float:
        own = [one[system] for one in placed.values() if system in one]
        return statistics.fmean(own) if own else math.inf

    rows = [
        [f"`{name}`", SYSTEMS[name].title, *(cells.get((name, key), "to run") for key in board)]
        for name in sorted(SYSTEMS, key=place)
    ]
    whole = markdown_table(["name", "system", *(made[key]["title"] for key in board)], rows)
    settings = [
        f"- **{one['title']}**: {one['setting'].format_map(one)}; rates "
        f"{', '.join(f'{x:g}' for x in one['rates'])}, seeds {', '.join(map(str, one['seeds']))}; "
        f"{counts(board.get(key, []))}to run: {len(SYSTEMS) - len(board.get(key, ()))} of "
        f"{len(SYSTEMS)}."
        for key, one in made.items()
    ]
    return "\n\n".join([whole, one_line(form["note"]), "\n".join(settings)])


def told(one: Scored, placed: Mapping[str, int]) -> str:
    several = f" ({min(one.scores):.3f} to {max(one.scores):.3f})" if len(one.scores) > 1 else ""
    return f"{one.mean:.3f}{several}, band {placed[one.system]}"


def counts(ranked: list[Scored]) -> str:
    if not ranked or ranked[0].lower:
        return ""
    solve = sum(one.mean > SOLVED for one in ranked)
    guess = sum(abs(one.mean) < TIE[False] for one in ranked)
    return f"above {SOLVED}: {solve}, within {TIE[False]} of a guess: {guess}; "


def draw(form: Form, results: list[Result]) -> Figure:
    """A panel for each task, systems by their places, a mark for each seed."""
    made, board = form["columns"], board_of(form, results)
    across = min(ACROSS, len(board))
    down, longest = -(-len(board) // across), max(map(len, board.values()))
    figure = new_figure(WIDTH * across, (LINE * longest + 1.2) * down)
    for index, (key, ranked) in enumerate(board.items()):
        axes = figure.add_subplot(down, across, index + 1)
        dress(axes, title=made[key]["title"], x=UNIT[ranked[0].lower], y="")
        axes.grid(axis="x", color="#dddddd", linewidth=0.8)
        for place, one in enumerate(ranked):
            axes.plot(one.scores, [-place] * len(one.scores), color=DARK, marker="o", linestyle="")
        axes.set_yticks([-i for i in range(len(ranked))], [title_of(one.system) for one in ranked])
        axes.set_ylim(-longest, 1)
    return figure
