"""What an experiment is: cells to run, a figure, a table, and words."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from experiments.words import Form, Scale, Words

# Seconds of training that a kill may cost a cell.
SAVE_SECONDS = 30.0


class Cell(Protocol):
    """One training run or measurement: a frozen dataclass of plain values, all that it depends on.

    It is sent to another process and written to JSON, so each field is a number, a string, a tuple,
    or a frozen dataclass of such.
    """

    @property
    def name(self) -> str:
        """Unique in its experiment, and a plain file name: `deltanet-d64-seed0`."""

    def run(self, folder: Path, device: torch.device) -> dict[str, Any]:
        """Train and measure; figures as JSON can hold them.

        The folder is this cell's alone: after a kill it holds what the cell had left there, and the
        cell goes on from it.
        """


@dataclass(frozen=True)
class Result:
    """One finished cell, as it is read back from JSON."""

    name: str
    """The cell's."""
    cell: dict[str, Any]
    """`dataclasses.asdict` of the cell, tuples as lists."""
    figures: dict[str, Any]
    """What its run returned; empty if it failed."""
    error: str | None = None
    """Why it failed, such as "DivergedError: the loss is not finite at step 9"; None if it did not.
    """


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One figure or table of a paper, run again."""

    name: str
    """Its key in `EXPERIMENTS`."""
    words: Words
    """Title, source, what its forms take, and what differs from the paper."""
    forms: Mapping[Scale, Form]
    """The settings of each form; `published` among them holds the paper's figures, and `grows`
    says that it is reported with the cells that there are, which join those of before."""
    make: Callable[[Form], Sequence[Cell]]
    """From a form to the cells."""
    draw: Callable[[Form, list[Result], Path], None]
    """Writes the PNG of finished cells, with published values as hollow marks."""
    table: Callable[[Form, list[Result]], str]
    """A table of finished cells in Markdown: ours beside the published values."""
    timed: bool = False
    """Cells take times, so one runs at a time, whatever --workers says."""

    def cells(self, scale: Scale) -> Sequence[Cell]:
        """What a form runs."""
        return self.make(self.forms[scale])


def finished(results: Sequence[Result]) -> list[Result]:
    """Those that did not fail."""
    return [result for result in results if result.error is None]
