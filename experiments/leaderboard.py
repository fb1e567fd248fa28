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
from deltarule.train.extra import require
from deltarule.train.figures import DARK, DOTS_PER_INCH, dress, save
from experiments.experiment import Result
from experiments.figures import title_of
from experiments.leaderboard_tasks import Columns, columns
from experiments.records import write_json
from experiments.task_cell import TaskCell
from experiments.text_cell import TextCell
from experiments.words import Form

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
        rate = max(self.rates, key=lambda one: sign * score(self.first, tried[one]))
        further = [self.trained(rate, seed, folder, device) for seed in self.seeds[1:]]
        runs = [tried[rate], *further]
        return {
            "rate": rate,
            "scores": [score(self.first, run) for run in runs],
            "tried": {f"{one:g}": score(self.first, run) for one, run in tried.items()},
            "steps": [run["steps"] for run in runs],
            "parameters": runs[0]["parameters"],
            "training_seconds": sum(run["training_seconds"] for run in [*tried.values(), *further]),
        }

    def trained(self, rate: float, seed: int, folder: Path, device: torch.device) -> dict[str, Any]:
        """One training run, or what it found when it was run before."""
        own = folder / f"lr{rate:g}-seed{seed}"
        found = own / "figures.json"
        if not found.exists():
            cell = replace(at_rate(self.first, rate), loop=replace(self.first.loop, seed=seed))
            write_json(found, cell.run(own, device))
            shutil.rmtree(own / "checkpoints", ignore_errors=True)
        return json.loads(found.read_text(encoding="utf-8"))


def at_rate(cell: TaskCell | TextCell, rate: float) -> TaskCell | TextCell:
    return replace(cell, optimizer=replace(cell.optimizer, lr=rate))


def score(cell: TaskCell | TextCell, figures: dict[str, Any]) -> float:
    """Bits per byte of text; of a task the accuracy, scaled so that guessing is 0 and all is 1."""
    first = next(iter(figures["evaluations"].values()))
    if isinstance(cell, TextCell):
        return float(first["bits_per_byte"])
    chance: float = cell.evaluations[0].config.chance
    return (float(first["accuracy"]) - chance) / (1 - chance)


def cells(form: Form) -> list[Entry]:
    return [
        Entry(
            name=f"{system}-{key}",
            first=at_rate(column.cell(system), column.rates[0]),
            rates=column.rates,
            seeds=column.seeds,
        )
        for key, column in columns(form).items()
        for system in SYSTEMS
    ]


class Scored(NamedTuple):
    """What is known of one system on one task."""

    system: str
    scores: list[float]
    """Of each seed."""
    lower: bool
    """Whether less is better."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)

    @property
    def range(self) -> tuple[float, float]:
        """The best and the worst seed, as numbers of which the larger is better."""
        signed = [-x if self.lower else x for x in self.scores]
        return max(signed), min(signed)


Board = dict[str, list[Scored]]


def board_of(made: Columns, results: list[Result]) -> Board:
    """All systems on each task that has any, the best mean first."""
    done = {result.name: result.figures["scores"] for result in results}
    board: Board = {}
    for key in made:
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
        best, least = one.range
        if not band or best < worst - TIE[one.lower]:
            band, worst = band + 1, least
        told[one.system] = band
    return told


def table(form: Form, results: list[Result]) -> str:
    """A row for each system and a column for each task that anything has run; then the settings.

    Systems come by the mean of their bands over the tasks that they have run.
    """
    made = columns(form)
    board = board_of(made, results)
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
    whole = markdown_table(["name", "system", *(made[key].title for key in board)], rows)
    return f"{whole}\n\n{REMARK}\n\n{settings(made, board)}"


def told(one: Scored, placed: Mapping[str, int]) -> str:
    several = f" ({min(one.scores):.3f} to {max(one.scores):.3f})" if len(one.scores) > 1 else ""
    return f"{one.mean:.3f}{several}, band {placed[one.system]}"


def settings(made: Columns, board: Board) -> str:
    """What each task is, and how many systems solve it, guess, and are still to run."""
    return "\n".join(
        f"- **{column.title}**: {column.setting}; rates "
        f"{', '.join(f'{x:g}' for x in column.rates)}, seeds {', '.join(map(str, column.seeds))}; "
        f"{counts(board.get(key, []))}to run: {len(SYSTEMS) - len(board.get(key, ()))} of "
        f"{len(SYSTEMS)}."
        for key, column in made.items()
    )


def counts(ranked: list[Scored]) -> str:
    """How many systems solve a task, and how many guess; nothing of text.

    Examples:
        >>> counts([Scored("a", [1.0], False), Scored("b", [0.05], False)])
        'above 0.99: 1, within 0.1 of a guess: 1; '
    """
    if not ranked or ranked[0].lower:
        return ""
    solve = sum(one.mean > SOLVED for one in ranked)
    guess = sum(abs(one.mean) < TIE[False] for one in ranked)
    return f"above {SOLVED}: {solve}, within {TIE[False]} of a guess: {guess}; "


def draw(form: Form, results: list[Result], path: Path) -> None:
    """A panel for each task, systems by their places, a mark for each seed."""
    made = columns(form)
    board = board_of(made, results)
    across = min(ACROSS, len(board))
    down = -(-len(board) // across)
    longest = max(map(len, board.values()))
    size = WIDTH * across, (LINE * longest + 1.2) * down
    figure = require("matplotlib.figure").Figure(
        figsize=size, dpi=DOTS_PER_INCH, layout="constrained"
    )
    for index, (key, ranked) in enumerate(board.items()):
        axes = figure.add_subplot(down, across, index + 1)
        dress(axes, title=made[key].title, x=UNIT[ranked[0].lower], y="")
        axes.grid(axis="x", color="#dddddd", linewidth=0.8)
        for place, one in enumerate(ranked):
            axes.plot(one.scores, [-place] * len(one.scores), color=DARK, marker="o", linestyle="")
        axes.set_yticks([-i for i in range(len(ranked))], [title_of(one.system) for one in ranked])
        axes.set_ylim(-longest, 1)
    save(figure, path)


REMARK = (
    "Accuracy is scaled so that guessing is 0 and all answers right is 1: the mean of the seeds, "
    "and their range. A new band begins where even the best seed is below the worst one of the "
    "system that leads the band before, by more than 0.1 (text: 0.02); systems of one band are not "
    "told apart. Each system runs "
    "with its own defaults (convolution, gates, range of eigenvalues): a row says what its name "
    "gives, not what it could be made to do."
)
