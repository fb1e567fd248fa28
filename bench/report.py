"""`python -m bench.report`: the page of figures and its picture, from raw figures.

The page keeps what stands outside the two marks; what is between them is written anew.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.adapters import OURS
from bench.figure import draw_figure
from bench.results import groups, load
from bench.table import number, report_tables
from bench.targets import TARGETS, Target, Verdict, verdict

Row = dict[str, Any]

BEGIN, END = "<!-- figures: written by a script, do not edit -->", "<!-- end of figures -->"
NOT_MEASURED = "not measured"
NEW_PAGE = f"""# Performance

How fast the operators are, beside the least time that the hardware needs and beside other packages.

{BEGIN}
{END}
"""


def write_page(reports: Sequence[Row], page: Path, picture: Path) -> None:
    """Draw the picture and write the figures into the page, which is begun if there is none.

    Args:
        reports: What `deltarule bench` and `deltarule bench model` wrote, in any order.
        page: The Markdown file.
        picture: Where the PNG goes.

    Raises:
        ValueError: The page has lost one of its marks.
    """
    text = page.read_text() if page.exists() else NEW_PAGE
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} lacks {BEGIN!r} or {END!r}: put both back, each on its own line")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    timed = joined(reports)
    lines = figures(reports, timed)
    if timed is not None and groups(timed["rows"]):
        draw_figure(timed, picture)
        link = Path(picture.name)
        if picture.parent != page.parent:
            link = picture.resolve().relative_to(page.resolve().parent)
        lines += ["", f"![Times above the floor, each operator and shape]({link.as_posix()})"]
    page.write_text(before + "\n".join([BEGIN, "", *lines, "", END]) + after)


def figures(reports: Sequence[Row], timed: Row | None) -> list[str]:
    """All lines between the marks."""
    lines = ["## Targets", "", *target_table(reports)]
    for report in reports:
        lines += ["", *conditions(report)]
    if timed is not None:
        for title, heads, cells, notes in report_tables(timed):
            lines += ["", f"### {title[0].upper()}{title[1:]}", "", *markdown(heads, cells)]
            lines += ["", *(f"- {note}" for note in notes)] if notes else []
    return lines


def joined(reports: Sequence[Row]) -> Row | None:
    """One report of all rows; of an operation and shape measured twice, the newest report's rows.

    Rows of one operation and shape come from one report, so that they can be compared.
    """
    if not reports:
        return None
    oldest_first = sorted(reports, key=lambda report: str(report["date"]))
    chosen: dict[tuple[Any, ...], list[Row]] = {}
    for report in oldest_first:
        here: dict[tuple[Any, ...], list[Row]] = {}
        for row in report["rows"]:
            shape = row["shape"][0] if "shape" in row else row.get("batch")
            here.setdefault((row["kind"], row.get("operation"), shape), []).append(row)
        # Nor does a report without us replace one that compares with us.
        for key, rows in here.items():
            if key not in chosen or any(row["peer"] == OURS for row in rows):
                chosen[key] = rows
    rows = [row for group in chosen.values() for row in group]
    return {**oldest_first[-1], "rows": rows}


def conditions(report: Row) -> list[str]:
    """When, where, with what and by which command."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    told = f"{report['date']} on {report['device']}: {versions}."
    if ceilings := report["ceilings"]:
        told += (
            f" Measured beside: copy {ceilings.get('copy_TB_s', 0):.2f} TB/s, bfloat16 matrix "
            f"product {ceilings.get('matrix_TFLOP_s', 0):.0f} TFLOP/s."
        )
    return [told, "", "```text", str(report["command"]), "```"]


def target_table(reports: Sequence[Row]) -> list[str]:
    """Every target with what was measured."""
    heads = ["figure", "asked", "deltarule", "best of FLA and FlashQLA", "ratio", "reached"]
    return markdown(heads, [target_line(verdict(target, reports)) for target in TARGETS])


def target_line(found: Verdict) -> list[str]:
    """A target in words."""
    unit = found.target.unit
    ours = NOT_MEASURED if found.ours is None else f"{number(found.ours)} {unit}"
    theirs = NOT_MEASURED
    if found.theirs is not None:
        theirs = f"{number(found.theirs)} {unit} ({found.rival})"
    ratio = NOT_MEASURED if found.ratio is None else f"{found.ratio:.2f}"
    reached = {True: "yes", False: "no", None: NOT_MEASURED}[found.met]
    return [found.target.what, asked(found.target), ours, theirs, ratio, reached]


def asked(target: Target) -> str:
    """What a target asks for."""
    if target.bound is not None:
        return f"at most {number(target.bound)} {target.unit}"
    return "no worse" if target.ratio == 1.0 else f"{target.ratio:g} x better"


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A table."""
    rows = [heads, ["---"] * len(heads), *lines]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def main() -> None:
    """Read the raw figures in docs/figures and write docs/performance.md."""
    parser = argparse.ArgumentParser(description="Write docs/performance.md from raw figures.")
    parser.add_argument("reports", type=Path, nargs="*", help="default: docs/figures/bench_*.json")
    parser.add_argument("--page", type=Path, default=Path("docs/performance.md"))
    parser.add_argument("--picture", type=Path, default=Path("docs/figures/bench.png"))
    options = parser.parse_args()
    paths = options.reports or sorted(Path("docs/figures").glob("bench_*.json"))
    write_page([load(path) for path in paths], options.page, options.picture)
    print(f"{options.page} from {', '.join(map(str, paths)) or 'no report'}")


if __name__ == "__main__":
    main()
