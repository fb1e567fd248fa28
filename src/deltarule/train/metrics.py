"""metrics.jsonl: one JSON object a line, appended as the run goes, cut back when it resumes."""

import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from deltarule.atomic_file import write_atomically
from deltarule.errors import reason
from deltarule.json_file import fitted, parse_object
from deltarule.models.files import write_text

Row = dict[str, Any]
# What else takes a row.
Sink = Callable[[Row], None]


class Metrics:
    """Appends rows to a file; every row holds its step.

    Rows after the step `after` are dropped first: a resumed run writes them again. A `quiet` one
    writes nothing: another process does. `also` takes each row, too.
    """

    def __init__(
        self, path: Path, *, after: int, quiet: bool = False, also: Sequence[Sink] = ()
    ) -> None:
        self._also = also
        if quiet:
            self._file: IO[str] = io.StringIO()
            return
        rows = [row for row in read_metrics(path) if row["step"] <= after]
        kept = "".join(_line(row) for row in rows)
        write_atomically(path, lambda aside: write_text(aside, kept))
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


def _line(row: Row) -> str:
    """JSON has no nan and no infinity: those become null."""

    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({key: plain(value) for key, value in row.items()}) + "\n"
