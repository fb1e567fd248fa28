"""`deltarule runs`: which runs there are, how far they have come, and in what they differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltarule.config_file import flat, to_toml
from deltarule.json_file import fitted
from deltarule.models.files import naming
from deltarule.train.checkpoint import checkpoint_steps
from deltarule.train.metrics import Row, read_metrics
from deltarule.train.progress import for_screen
from deltarule.train.run_folder import DIVERGED, RUN, RunFolderError, RunRecord, locked, read_run
from deltarule.train.watch import figures


@dataclass(frozen=True)
class RunsRun:
    """List the runs of a folder; of several that are named, show what differs."""

    names: tuple[str, ...] = ()
    """Only these runs; their options and figures stand side by side. They may stand behind the
    command without this flag."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    toml: bool = False
    """Print the flags of each as a file for --config-file instead."""


def show_runs(run: RunsRun) -> None:
    folders = [Path(n) if (Path(n) / RUN).is_file() else run.runs / n for n in run.names]
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise missing_run(missing[0])
    if not folders:
        folders = sorted((path.parent for path in run.runs.glob(f"*/{RUN}")), key=began)
    if not folders:
        raise RunFolderError(f"{run.runs}: there are no runs; start one with: deltarule train text")
    if run.toml:
        for folder in folders:
            record = read_run(folder)
            options = flat(record.configuration)
            kept = {n: x for n, x in options.items() if n not in ("name", "runs", "resume")}
            print(f"# deltarule {record.command} --config-file FILE\n{to_toml(kept)}", end="")
        return
    if len(run.names) > 1:
        found = differences([read_run(folder) for folder in folders])
        print(for_screen(table([["", *run.names], *found])))
    rows = [["run", "of", "step", "state", "last validation"]]
    for folder in folders:
        try:
            rows.append(summary(folder))
        except RunFolderError as error:
            # One that is damaged hides none of the others.
            if run.names:
                raise
            print(for_screen(f"note: {error}"))
    print(for_screen(table(rows)))


def missing_run(folder: Path) -> RunFolderError:
    """What to raise where a run is named that is not there: it names the newest that are."""
    if folder.is_file():
        return RunFolderError(f"{folder}: a file; give the folder of a run")
    found = [*folder.parent.glob(f"*/{RUN}"), *Path("runs").glob(f"*/{RUN}")]
    found.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    known = list(dict.fromkeys(str(path.parent) for path in found))[:3]
    hint = f"; the newest there are: {', '.join(known)}" if known else ""
    return RunFolderError(f"{folder}: there is no such run{hint}")


def began(folder: Path) -> float:
    return (folder / RUN).stat().st_mtime


def differences(records: Sequence[RunRecord]) -> list[list[str]]:
    options = [flat(record.configuration) for record in records]
    names = dict.fromkeys(name for one in options for name in one)
    rows = [[name.replace("_", "-"), *(shown(one.get(name)) for one in options)] for name in names]
    return [row for row in rows if row[0] != "name" and len(set(row[1:])) > 1]


def summary(folder: Path) -> list[str]:
    """One run as a row: how far it has come, and what it measured last."""
    record = read_run(folder)
    with naming(folder / RUN, RunFolderError):
        steps: int = fitted(int, flat(record.configuration).get("steps"), "steps")
    rows = read_metrics(folder / "metrics.jsonl")
    step = max([row["step"] for row in rows] + checkpoint_steps(folder / "checkpoints"), default=0)
    done = state(folder, record, step)
    return [folder.name, record.command, f"{step:,}/{steps:,}", done, last_measured(rows)]


def state(folder: Path, record: RunRecord, step: int) -> str:
    """Whether a run is going on, is done, has diverged, or stopped before its end."""
    try:
        with locked(folder):
            pass
    except RunFolderError:
        return "running"
    if (folder / DIVERGED).exists():
        return "diverged"
    return "done" if record.done is not None and record.done >= step else "stopped"


def last_measured(rows: Sequence[Row]) -> str:
    measured = (
        {n: x for n, x in figures(row).items() if n.startswith(("validation_", "final_"))}
        for row in reversed(rows)
    )
    last = next(filter(None, measured), {})
    return ", ".join(f"{name.split('_', 1)[1]} {value:.4g}" for name, value in last.items())


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be.

    Examples:
        >>> print(table([["a", "bb"], ["ccc", "d"]]))
        a    bb
        ccc  d
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
