"""What an experiment is: cells to run, a figure, a table, and what differs from the paper."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

# A form for two CPU cores, one for minutes on GPUs, and the paper's own setting, for hours on them.
Scale = Literal["laptop", "gpu", "published"]
SCALES: tuple[Scale, ...] = ("laptop", "gpu", "published")
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
        """Train and measure.

        Args:
            folder: Of this cell alone; after a kill it holds what the cell had left there, and the
                cell goes on from it.
            device: Where to compute.

        Returns:
            The figures, as JSON can hold them.
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
    error: str | None
    """Why it failed, such as "DivergedError: the loss is not finite at step 9"; None if it did not.
    """
    seconds: float
    """That its last run took, after a stop without what came before it."""


@dataclass(frozen=True)
class Experiment:
    """One figure or table of a paper, run again."""

    name: str
    """Its key in `EXPERIMENTS`."""
    title: str
    """Its heading."""
    shows: str
    """What a reader sees, in one or two sentences."""
    source: str
    """Paper and figure or table."""
    needs: dict[Scale, str]
    """What each form takes, such as "7 curves of 2 minutes on 2 cores". A form without an entry
    does not exist."""
    cells: Callable[[Scale], list[Any]]
    """From the scale to the cells."""
    draw: Callable[[Scale, list[Result], Path], None]
    """Writes the PNG, with published values as hollow marks."""
    table: Callable[[Scale, list[Result]], str]
    """A table in Markdown: ours beside the published values."""
    deviations: dict[Scale, list[str]] = field(default_factory=dict)
    """Every way in which a form differs from the paper's setting, a sentence each."""
    timed: bool = False
    """Cells take times, so one runs at a time, whatever --workers says."""
    grows: bool = False
    """It is reported with the cells that there are, and new ones join those that are published."""


def finished(results: list[Result]) -> list[Result]:
    """Those that did not fail.

    Examples:
        >>> finished([Result("a", {}, {}, "DivergedError: at step 9", 1.0)])
        []
    """
    return [result for result in results if result.error is None]
