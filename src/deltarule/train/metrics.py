"""What is measured of a run: metrics.jsonl, other programs that draw it, the best evaluation.

The file has one JSON object a line, appended as the run goes and cut back when it resumes.
"""

import contextlib
import hashlib
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from deltarule.atomic_file import write_text
from deltarule.errors import reason
from deltarule.json_file import fitted, parse_object
from deltarule.nn.checks import check_least
from deltarule.train.extra import require

Row = dict[str, Any]
# What else takes a row.
Sink = Callable[[Row], object]


class Metrics:
    """Appends rows to a file; every row holds its step.

    Rows after the step `after` are dropped first: a resumed run writes them again. At the `end` of
    a run so is a row of final figures at that step. A `quiet` one writes nothing: another process
    does. `also` takes each row, too.
    """

    def __init__(
        self, path: Path, *, after: int, end: bool = False, quiet: bool = False,
        also: Sequence[Sink] = (),
    ) -> None:  # fmt: skip
        self._also = also
        if quiet:
            self._file: IO[str] = io.StringIO()
            return
        rows = [row for row in read_metrics(path) if row["step"] <= after]
        if end:
            rows = [row for row in rows if row["step"] < after or not is_final(row)]
        write_text(path, "".join(map(_line, rows)))
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        self._file.write(_line(row))
        self._file.flush()
        for sink in self._also:
            sink(row)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Row]:
    """Rows of a file, or none without one.

    A line that a kill cut short is left out, and so, with a note, is any other that is no row.
    """
    rows, bad = [], []
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = parse_object(line.decode())
            fitted(int, row.get("step"), "step")
        except ValueError as error:
            bad.append(f"line {number}: {reason(error)}")
        else:
            rows.append(row)
    if bad:
        print(f"note: {path}: left out {len(bad)} of {len(lines) - 1} lines; {bad[0]}")
    return rows


def is_final(row: Row) -> bool:
    return any(name.startswith("final_") for name in row)


def _line(row: Row) -> str:
    """JSON has no nan and no infinity: those become null."""

    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({key: plain(value) for key, value in row.items()}) + "\n"


@dataclass(frozen=True)
class WatchOptions:
    """When to end early, and where to send metrics."""

    patience: int = 0
    """Stop after this many short evaluations in a row without an improvement, and keep the best
    model; 0 trains to the end."""
    log: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Also send metrics to these; each needs the extra of its name."""

    def __post_init__(self) -> None:
        check_least(self, 0, "patience")


@dataclass(frozen=True)
class Best:
    """The best short evaluation so far, and how many came after it."""

    step: int = 0
    value: float | None = None
    waited: int = 0

    def after(self, step: int, measured: dict[str, float]) -> "Best":
        """Take one more evaluation: lower is better, but for an accuracy."""
        name, value = next(iter(measured.items()))
        value = -value if name.endswith("accuracy") else value
        if math.isfinite(value) and (self.value is None or value < self.value):
            return Best(step, value)
        return Best(self.step, self.value, self.waited + 1)


@contextlib.contextmanager
def sinks(log: tuple[str, ...], folder: Path, *, first: bool) -> Iterator[list[Sink]]:
    """Where the first process of a run sends metrics beside their file; closed in the end."""
    found: list[Sink] = []
    with contextlib.ExitStack() as opened:
        if first and "tensorboard" in log:
            # `tensorboard --logdir runs` shows them.
            require("tensorboard", "tensorboard")
            writer = require("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))
            opened.callback(writer.close)
            found.append(
                lambda row: [writer.add_scalar(n, x, row["step"]) for n, x in figures(row).items()]
            )
        if first and "wandb" in log:
            # A run of Weights & Biases, the same one when this run goes on.
            name = hashlib.sha256(str(folder.absolute()).encode(errors="replace")).hexdigest()[:16]
            run = require("wandb", "wandb").init(
                project="deltarule", name=folder.name, id=name, resume="allow", dir=str(folder)
            )
            opened.callback(run.finish)
            found.append(lambda row: run.log(figures(row), step=row["step"]))
        yield found


def figures(row: Row) -> dict[str, float]:
    return {n: x for n, x in row.items() if n != "step" and isinstance(x, int | float)}
