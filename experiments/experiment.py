"""What an experiment is: cells to run, a figure and a table; its settings, and words beside them.

Its module has `cells`, `draw` and `table`, and `TIMED` if its cells take times. Beside it lies
`settings/NAME.toml` with a table for each form. What stands under `all` holds for every form that
does not say otherwise. `model`, `optimizer`, `loop` and `cell` are arguments of `ModelConfig`,
`OptimizerOptions`, `LoopOptions` and `TaskCell`. `words` is for readers: see `Words`.
"""

import importlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, Protocol

import torch

from deltarule.nearest import check_known
from deltarule.train.figures import save

# A form for two CPU cores, one for minutes on GPUs, and the paper's own setting, for hours on them.
Scale = Literal["laptop", "gpu", "published"]
SCALES: tuple[Scale, ...] = ("laptop", "gpu", "published")
Form = dict[str, Any]
HERE = Path(__file__).parent
NAMES = """
    leaderboard mqar memory language extrapolation ablation speedup throughput mad regbench
    state-tracking groups niah causes
"""
# Imported on demand.
EXPERIMENTS = {name: f"experiments.{name.replace('-', '_')}" for name in NAMES.split()}


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
    """One finished cell, as it is read back from JSON.

    `cell` is `dataclasses.asdict` of it, `figures` what its run returned, empty if it failed for
    the reason `error`, such as "DivergedError: the loss is not finite at step 9".
    """

    name: str
    cell: dict[str, Any]
    figures: dict[str, Any]
    error: str | None = None


def finished(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.error is None]


class Words(NamedTuple):
    """What a page says of an experiment that no result decides."""

    title: str
    shows: str
    source: str
    needs: dict[Scale, str]
    """What each form takes, such as "7 curves of 2 minutes on 2 cores". A form without an entry
    does not exist."""
    deviations: dict[Scale, list[str]]
    """Every way in which a form differs from the paper's setting, a sentence each."""
    remark: str
    """Below the table."""
    published: Mapping[str, Mapping[Any, float]]
    """The paper's figures by row and column; a column that is named by a number is an int."""


@dataclass(frozen=True)
class Experiment:
    """One figure or table of a paper, run again.

    `published` among the settings of a form holds the paper's figures, and `grows` says that it is
    reported with the cells that there are, which join those of before.
    """

    name: str
    words: Words
    forms: Mapping[Scale, Form]
    module: ModuleType

    @property
    def timed(self) -> bool:
        """Whether one cell runs at a time, whatever --workers says, because it takes times."""
        return getattr(self.module, "TIMED", False)

    def cells(self, scale: Scale) -> list[Any]:
        return list(self.module.cells(self.forms[scale]))

    def draw(self, scale: Scale, results: list[Result], path: Path) -> None:
        """Write the picture of finished cells, with published values as hollow marks."""
        save(self.module.draw(self.forms[scale], results), path)

    def table(self, scale: Scale, results: list[Result]) -> str:
        return str(self.module.table(self.forms[scale], results))


def load_experiment(name: str) -> Experiment:
    check_known("NAME", name, EXPERIMENTS)
    module = importlib.import_module(EXPERIMENTS[name])
    folder = Path(module.__file__ or "").parent
    words = words_of(read_table(name, folder)["words"])
    published = {"published": words.published}
    forms = {scale: form | published for scale, form in read_settings(name, folder).items()}
    return Experiment(name, words, forms, module)


def read_table(name: str, folder: Path) -> dict[Any, Form]:
    return tomllib.loads((folder / "settings" / f"{name}.toml").read_text(encoding="utf-8"))


def read_settings(name: str, folder: Path = HERE) -> dict[Any, Form]:
    table = read_table(name, folder)
    common = table.get("all", {})
    own = {scale: form for scale, form in table.items() if scale not in ("all", "words")}
    return {scale: merged(common, form) for scale, form in own.items()}


def words_of(table: Form) -> Words:
    """Words of a settings table: line breaks in them mean nothing, and differences name forms."""
    published = {
        row: {int(name) if name.isdigit() else name: float(x) for name, x in cells.items()}
        for row, cells in table.get("published", {}).items()
    }
    needs: dict[Scale, str] = {scale: one_line(text) for scale, text in table["needs"].items()}
    differences: list[Form] = table.get("differences", [])
    deviations = {
        scale: [one_line(x) for one in differences if scale in one["forms"] for x in one["are"]]
        for scale in needs
    }
    shows, source, remark = (
        one_line(table.get(name, "")) for name in ("shows", "source", "remark")
    )
    return Words(table["title"], shows, source, needs, deviations, remark, published)


def one_line(text: str) -> str:
    return " ".join(text.split())


def merged(common: Any, own: Any) -> Any:
    """The own value, or of two tables the entries of both."""
    if isinstance(common, dict) and isinstance(own, dict):
        return common | {key: merged(common.get(key), value) for key, value in own.items()}
    return own
