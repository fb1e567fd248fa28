"""A report as tables: in the terminal, and on the page of performance."""

import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.cases import OPERATIONS, Shape
from bench.markdown import markdown_table
from bench.results import PASSES

Row = dict[str, Any]
Cells = list[str]

NOTHING = "-"

# Columns of timed passes behind the peer and the pass, with the key of each figure.
TIMES = {
    "graph ms": "graph_ms", "eager ms": "eager_ms", "TFLOP/s": "TFLOP_s", "GB/s": "GB_s",
    "x floor": "times_floor", "extra MiB": "extra_MiB", "first s": "first_s",
}  # fmt: skip


class Table(NamedTuple):
    """Title, heads, lines, and what stands below: why figures are missing."""

    title: str
    heads: Cells
    lines: list[Cells]
    notes: list[str]


def show(report: Row) -> None:
    for title, heads, lines, notes in report_tables(report):
        print("\n".join(["", f"{title}:", "", markdown_table(heads, lines), *notes]))


def report_tables(report: Row) -> Iterator[Table]:
    """Every table that the report has rows for; of timed passes one for each case."""
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in report["rows"]:
        if row["kind"] == "time":
            cases.setdefault((row["operation"], row["shape"][0]), []).append(row)
    for operation, its_title in OPERATIONS.items():
        for rows in (rows for (name, _), rows in cases.items() if name == operation):
            lines = [
                [row["peer"], title, *(number(row[name].get(key)) for key in TIMES.values())]
                for row in rows
                for name, title in PASSES.items()
                if "error" not in row.get(name, {"error": "not asked for"})
            ]
            title = f"{its_title.title}, {Shape(*rows[0]['shape']).label}"
            yield Table(title, ["peer", "pass", *TIMES], lines, refusals(rows))
    for kind, (title, heads, line_of) in OTHERS.items():
        rows = [row for row in report["rows"] if row["kind"] == kind]
        lines = [line_of(row) for row in rows if "error" not in row]
        if rows:
            yield Table(title, heads, lines, refusals(rows))


def refusals(rows: list[Row]) -> list[str]:
    found = []
    for row in rows:
        who = ", ".join(filter(None, [row["peer"], label(row)]))
        found += [(who, row.get("error")), (f"{who}, backward", row.get("backward_error"))]
        for name, title in PASSES.items():
            for clock, key in (("", ""), (", graph", "graph_ms_"), (", eager", "eager_ms_")):
                found.append((f"{who}, {title}{clock}", row.get(name, {}).get(f"{key}error")))
    return [f"{what}: {why}" for what, why in found if why is not None]


def label(row: Row) -> str:
    """What a row of a table of several operators is about."""
    if row["kind"] == "model":
        return f"{row['batch']}x{row['tokens']}"
    if row["kind"] in ("generate", "train"):
        sizes = [str(row[name]) for name in ("batch", "rows", "tokens") if name in row]
        return ", ".join(filter(None, [row["model"], "x".join(sizes)]))
    return "" if row["kind"] == "time" else OPERATIONS[row["operation"]].title


def number(value: float | None) -> str:
    """Three significant figures, and no exponent for what is read as a count."""
    if value is None:
        return NOTHING
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def line_of(figures: Cells, row: Row) -> Cells:
    """What a row is about, the peer, and its figures; of errors o, state and worst gradient."""
    if row["kind"] != "error":
        return [label(row), row["peer"], *(number(row.get(key)) for key in figures)]
    errors = row["errors"]
    gradients = {name: x for name, x in errors.items() if name.startswith("grad")}
    worst = max(gradients, key=lambda name: gradients[name], default=None)
    told = f"{worst.removeprefix('grad ')} {gradients[worst]:.1e}" if worst else NOTHING
    cells = [f"{errors[name]:.1e}" if name in errors else NOTHING for name in figures]
    return [label(row), row["peer"], *cells, told]


# Title, heads and the line of a row, by the kind of rows.
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
OTHERS: dict[str, tuple[str, Cells, Callable[[Row], Cells]]] = {
    kind: (table["title"], table["heads"], partial(line_of, table["figures"]))
    for kind, table in TABLE.items()
}
