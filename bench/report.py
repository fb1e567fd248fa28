"""`python -m bench.report`: the tables and the picture of docs/performance.md, from raw figures.

The page keeps what stands outside the two marks; what is between them is written anew.
"""

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.adapters import OURS
from bench.cases import LONG, NARROW, OPERATIONS, TRAIN, WIDE, Shape
from bench.markdown import markdown_table, write_between
from bench.results import PASSES, load
from deltarule.train.extra import require
from deltarule.train.figures import DARK, INK, LIGHT, MIDDLE, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
Cells = list[str]

# Columns and bars beside ours, with their heads.
PEERS = {"fla": "FLA", "flash_qla": "FlashQLA", "flashinfer": "FlashInfer"}
COLOURS = {"deltarule": DARK, "fla": LIGHT, "flash_qla": MIDDLE, "flashinfer": "#e3b291"}
# The shapes that fill a GPU and that several packages ran; the table has the others.
SHOWN = (TRAIN, LONG, NARROW, WIDE)
# Inches.
WIDTH, BAR, GAP, MARGIN = 8.0, 0.2, 0.22, 1.2
# Without equal digests, a time this near is taken for one of the same kernel.
REPEATS_WITHIN = 0.02
# Title, heads and keys of figures, by the kind of rows that are no timed passes.
TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NOTHING = "-"


class Timing(NamedTuple):
    """One pass of one operator at one shape: ours, and the peers.

    Those by name: milliseconds, and how many of ours they are; None where ours has changed since.
    `kernels`: the digest of the code that was timed; None in reports without one.
    """

    operation: str
    shape: Shape
    passed: str
    floor_ms: float
    ours_ms: float
    peers: dict[str, tuple[float, float | None]]
    kernels: str | None


def by_date(reports: Sequence[Row]) -> list[Row]:
    return sorted(reports, key=lambda report: str(report["date"]))


def by_device(reports: Sequence[Row]) -> dict[str, list[Timing]]:
    """Passes by GPU, that first on which most peers ran beside what ours is now."""
    devices = dict.fromkeys(str(report["device"]) for report in by_date(reports)[::-1])
    found = {name: timings([x for x in reports if str(x["device"]) == name]) for name in devices}
    filled = {name: passes for name, passes in found.items() if passes}
    return dict(sorted(filled.items(), key=lambda item: -ratios(item[1])))


def ratios(passes: Sequence[Timing]) -> int:
    return sum(ratio is not None for one in passes for _, ratio in one.peers.values())


def timings(reports: Sequence[Row]) -> list[Timing]:
    """Every pass that ran on a GPU, in the order of `OPERATIONS`; the newest run of a peer counts.

    A ratio compares two times of one run only. Our own time comes from the newest run, and ratios
    of runs in which it was another one are left out.
    """
    found: dict[tuple[str, str, str], Timing] = {}
    for report in by_date(reports):
        kernels = report.get("kernels")
        timed = [row for row in report["rows"] if row["kind"] == "time"]
        for ours in (row for row in timed if row["peer"] == OURS):
            operation, shape = ours["operation"], Shape(*ours["shape"])
            same = [x for x in timed if (x["operation"], x["shape"]) == (operation, ours["shape"])]
            for passed in PASSES:
                if (ms := graph_ms(ours, passed)) is None:
                    continue
                key, peers = (operation, shape.name, passed), dict[str, Any]()
                if (before := found.get(key)) is not None:
                    same_code = kernels is not None and kernels == before.kernels
                    still = same_code or abs(ms / before.ours_ms - 1) < REPEATS_WITHIN
                    kept = before.peers.items()
                    peers = {peer: (time, ratio if still else None) for peer, (time, ratio) in kept}
                times = {row["peer"]: graph_ms(row, passed) for row in same}
                peers |= {x: (time, time / ms) for x, time in times.items() if x in PEERS and time}
                floor = ours[passed]["floor_ms"]
                found[key] = Timing(operation, shape, passed, floor, ms, peers, kernels)
    order = list(OPERATIONS)
    return sorted(found.values(), key=lambda timing: order.index(timing.operation))


def graph_ms(row: Row, passed: str) -> float | None:
    return row.get(passed, {}).get("graph_ms")


def operator_table(found: Iterable[Timing]) -> str:
    """Milliseconds of every pass; a peer's with how many times ours they are."""
    heads = ["operator, batch x tokens, heads, size", "pass", "floor", "deltarule"]
    lines = []
    for one in found:
        what = f"{OPERATIONS[one.operation].title}, {one.shape.label}"
        ours = [number(one.floor_ms), f"**{number(one.ours_ms)}**"]
        lines.append([what, PASSES[one.passed], *ours, *(told(one.peers.get(x)) for x in PEERS)])
    return markdown_table([*heads, *PEERS.values()], lines)


def told(time: tuple[float, float | None] | None) -> str:
    """A peer's milliseconds and the ratio, with two figures after the point below 1.1."""
    if time is None:
        return NOTHING
    ms, ratio = time
    return number(ms) if ratio is None else f"{number(ms)} ({ratio:.{2 if ratio < 1.1 else 1}f} x)"


def other_tables(reports: Sequence[Row]) -> list[str]:
    """Errors, host times, first calls and whole models of each GPU, from the newest run of it."""
    lines: list[str] = []
    for kind, table in TABLES.items():
        newest: dict[str, dict[tuple[Any, ...], Row]] = {}
        for report in by_date(reports):
            of_device = newest.setdefault(str(report["device"]), {})
            for row in (row for row in report["rows"] if row["kind"] == kind):
                key = tuple(row.get(name) for name in ("operation", "model", "batch", "peer"))
                of_device[key] = row
        for device, rows in newest.items():
            # Peers of a case one below the other, in the order in which the cases came.
            cases = list(dict.fromkeys(key[:-1] for key in rows))
            rows = dict(sorted(rows.items(), key=lambda item: cases.index(item[0][:-1])))
            shown = [row for row in rows.values() if "error" not in row]
            if cells := [line_of(table["figures"], row) for row in shown]:
                head = f"## {table['title']}, {device}"
                lines += ["", head, "", markdown_table(table["heads"], cells)]
    return lines


def tables(reports: Sequence[Row]) -> list[str]:
    """Lines of Markdown with all figures of these reports, in any order."""
    lines: list[str] = []
    for name, passes in by_device(reports).items():
        lines += ["", f"## Operators, milliseconds, {name}", "", operator_table(passes)]
    return lines + other_tables(reports)


def label(row: Row) -> str:
    """What a row of a table of several operators is about."""
    if row["kind"] == "model":
        return f"{row['batch']}x{row['tokens']}"
    if row["kind"] in ("generate", "train"):
        sizes = [str(row[name]) for name in ("batch", "rows", "tokens") if name in row]
        return ", ".join(filter(None, [row["model"], "x".join(sizes)]))
    return OPERATIONS[row["operation"]].title


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


def write_page(reports: Sequence[Row], page: Path, picture: Path) -> None:
    """Draw the picture and write the figures of these reports into the page."""
    device, passes = next(iter(by_device(reports).items()))
    draw_figure(passes, picture, device)
    link = picture.resolve().relative_to(page.resolve().parent)
    lines = [f"![Milliseconds of the operators and of other packages]({link.as_posix()})"]
    lines += [*tables(reports), "", "## Runs", ""]
    for report in by_date(reports):
        versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        lines.append(f"- {report['date']}, {report['device']}; {versions}: `{report['command']}`")
    write_between(page, "figures", lines)


def draw_figure(timings: Sequence[Timing], path: Path, device: str) -> None:
    """Draw the passes at the shapes of training that a peer ran too, a bar for each package."""
    shown = [one for one in timings if one.shape.name in SHOWN and one.peers]
    panels = {name: [one for one in shown if one.passed == name] for name in PASSES}
    bars = max(sum(len(one.peers) + 1 for one in panel) for panel in panels.values())
    groups = max(map(len, panels.values()))
    figure = new_figure(WIDTH, MARGIN + BAR * bars + GAP * groups)
    for axes, (name, panel) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        draw_panel(axes, panel)
        axes.set_title(PASSES[name], loc="left", fontsize=10, color=INK)
    figure.suptitle(device, x=0.01, ha="left", fontsize=10, color=INK)
    used = dict.fromkeys(["deltarule", *(peer for one in shown for peer in one.peers)])
    patch = require("matplotlib.patches").Patch
    handles = [patch(color=COLOURS[peer], label=PEERS.get(peer, peer)) for peer in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save(figure, path)


def draw_panel(axes: "Axes", panel: Sequence[Timing]) -> None:
    """The bars of one pass from zero milliseconds, ours on top of each group."""
    y, ticks, labels, longest = 0.0, [], [], 0.0
    for one in panel:
        start = y
        times = {"deltarule": one.ours_ms} | {peer: ms for peer, (ms, _) in one.peers.items()}
        for peer, ms in times.items():
            bar = axes.barh(y, ms, BAR, color=COLOURS[peer])
            axes.bar_label(bar, [f"{ms:.3g}"], padding=2, fontsize=7, color=INK)
            longest = max(longest, ms)
            y += BAR
        # The least time that the hardware needs.
        axes.plot([one.floor_ms] * 2, [start - BAR / 2, y - BAR / 2], color=INK, linewidth=1)
        ticks.append((start + y - BAR) / 2)
        labels.append(f"{OPERATIONS[one.operation].title}\n{one.shape.label}")
        y += GAP
    axes.set_yticks(ticks, labels, fontsize=7)
    axes.set_xlim(0, 1.15 * longest or 1.0)
    axes.set_ylim(y, -BAR)
    axes.set_xlabel("milliseconds; line: the hardware's floor", fontsize=8, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8)


if __name__ == "__main__":
    docs = Path("docs")
    paths = sorted(docs.glob("figures/bench_*.json"))
    write_page([*map(load, paths)], docs / "performance.md", docs / "figures/bench.png")
    print(f"{docs / 'performance.md'} from {len(paths)} reports")
