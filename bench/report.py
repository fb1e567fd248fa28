"""`python -m bench.report`: the tables and the picture of docs/performance.md, from raw figures.

The page keeps what stands outside the two marks; what is between them is written anew.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.adapters import OURS
from bench.cases import OPERATIONS, Shape
from bench.figure import draw_figure
from bench.markdown import Marks, markdown, write_between
from bench.results import PASSES, load
from bench.table import OTHERS, number

Row = dict[str, Any]

MARKS = Marks("<!-- figures: written by a script, do not edit -->", "<!-- end of figures -->")
# Columns beside ours, with their heads.
PEERS = {"fla": "FLA", "flash_qla": "FlashQLA", "flashinfer": "FlashInfer"}
NOTHING = "-"
# Runs of the same kernel on two machines differ by less.
REPEATS_WITHIN = 0.02
Peers = dict[str, tuple[float, float | None]]


class Timing(NamedTuple):
    """One pass of one operator at one shape: ours, and the peers."""

    operation: str
    shape: Shape
    passed: str
    floor_ms: float
    ours_ms: float
    # By peer: its milliseconds, and how many of ours they are; None where ours has changed since.
    peers: Peers


def timings(reports: Sequence[Row]) -> list[Timing]:
    """Every pass that ran here, in the order of `OPERATIONS`; the newest run of each peer counts.

    A ratio compares two times of one run only. Our own time comes from the newest run, and ratios
    of runs in which it was another one are left out.
    """
    found: dict[tuple[str, str, str], Timing] = {}
    for report in sorted(reports, key=lambda report: str(report["date"])):
        for ours in of_kind(report, "time", OURS):
            for passed in PASSES:
                if (ms := graph_ms(ours, passed)) is None:
                    continue
                key = ours["operation"], ours["shape"][0], passed
                before = still_true(found[key], ms) if key in found else {}
                peers = before | beside(report, ours, passed, ms)
                floor = ours[passed]["floor_ms"]
                shape = Shape(*ours["shape"])
                found[key] = Timing(ours["operation"], shape, passed, floor, ms, peers)
    order = list(OPERATIONS)
    return sorted(found.values(), key=lambda timing: order.index(timing.operation))


def still_true(before: Timing, ms: float) -> Peers:
    """The peers of an older run, with their ratios where ours has not changed since."""
    same = abs(ms / before.ours_ms - 1) < REPEATS_WITHIN
    return {peer: (time, ratio if same else None) for peer, (time, ratio) in before.peers.items()}


def beside(report: Row, ours: Row, passed: str, ms: float) -> Peers:
    """The peers' times of the same pass in the same report."""
    same = [
        row
        for row in report["rows"]
        if row["kind"] == "time"
        and (row["operation"], row["shape"]) == (ours["operation"], ours["shape"])
    ]
    times = {row["peer"]: graph_ms(row, passed) for row in same}
    return {peer: (x, x / ms) for peer, x in times.items() if peer in PEERS and x is not None}


def graph_ms(row: Row, passed: str) -> float | None:
    """Milliseconds of a pass in a CUDA graph, if it ran."""
    return row.get(passed, {}).get("graph_ms")


def of_kind(report: Row, kind: str, peer: str | None = None) -> Iterator[Row]:
    for row in report["rows"]:
        if row["kind"] == kind and peer in (None, row["peer"]):
            yield row


def operator_table(found: Iterable[Timing]) -> list[str]:
    """Milliseconds of every pass; a peer's with how many times ours they are."""
    heads = ["operator, batch x tokens, heads, size", "pass", "floor", "deltarule"]
    lines = []
    for one in found:
        what = f"{OPERATIONS[one.operation].title}, {one.shape.label}"
        ours = [number(one.floor_ms), f"**{number(one.ours_ms)}**"]
        lines.append([what, PASSES[one.passed], *ours, *(told(one.peers.get(x)) for x in PEERS)])
    return markdown([*heads, *PEERS.values()], lines)


def told(time: tuple[float, float | None] | None) -> str:
    """A peer's milliseconds and the ratio.

    Examples:
        >>> told((0.84, 2.5766)), told((0.84, None)), told(None)
        ('0.84 (2.6 x)', '0.84', '-')
    """
    if time is None:
        return NOTHING
    ms, ratio = time
    return number(ms) if ratio is None else f"{number(ms)} ({number_of_times(ratio)} x)"


def number_of_times(ratio: float) -> str:
    """A ratio with two figures after the point below 1.1, else one."""
    return f"{ratio:.2f}" if ratio < 1.1 else f"{ratio:.1f}"


def other_tables(reports: Sequence[Row]) -> list[str]:
    """Errors, host times, first calls and whole models of each GPU, from the newest run of it."""
    lines: list[str] = []
    for kind, (title, heads, line_of) in OTHERS.items():
        newest: dict[str, dict[tuple[Any, ...], Row]] = {}
        for report in sorted(reports, key=lambda report: str(report["date"])):
            of_device = newest.setdefault(str(report["device"]), {})
            for row in of_kind(report, kind):
                size = row.get("model"), row.get("batch")
                of_device[row.get("operation"), *size, row["peer"]] = row
        for device, rows in newest.items():
            cells = [line_of(row) for row in rows.values() if "error" not in row]
            if cells:
                lines += ["", f"{title[0].upper()}{title[1:]}, {device}:"]
                lines += ["", *markdown(heads, cells)]
    return lines


def runs(reports: Sequence[Row]) -> list[str]:
    """When, where, with what and by which command each report was made, the oldest first."""
    lines = []
    for report in sorted(reports, key=lambda report: str(report["date"])):
        versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        lines.append(f"- {report['date']}, {report['device']}; {versions}: `{report['command']}`")
    return lines


def write_page(reports: Sequence[Row], page: Path, picture: Path) -> None:
    """Draw the picture and write the figures of these reports, in any order, into the page."""
    found = timings(reports)
    draw_figure(found, picture)
    link = picture.resolve().relative_to(page.resolve().parent)
    lines = [f"![Milliseconds of the operators and of other packages]({link.as_posix()})", ""]
    lines += [*operator_table(found), *other_tables(reports), "", "Runs:", "", *runs(reports)]
    write_between(page, MARKS, lines)


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
