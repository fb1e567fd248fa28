"""The runs that are there: `deltarule runs` lists and compares them, other commands take a model.

The model of a run is what it wrote at its end, else its newest checkpoint.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deltarule.atomic_file import lock
from deltarule.config_file import flat, to_toml
from deltarule.json_file import fitted
from deltarule.models import CausalLM, ModelConfig
from deltarule.models.files import CONFIG, INDEX, WEIGHTS, naming, read_config
from deltarule.train import checkpoint
from deltarule.train.metrics import figures, read_metrics
from deltarule.train.progress import for_screen
from deltarule.train.run_folder import DIVERGED, RUN, RunFolderError, RunRecord, read_run


@dataclass(frozen=True)
class RunsRun:
    """List the runs of a folder, or compare those that are named."""

    names: tuple[str, ...] = ()
    """Only these runs, with the options in which they differ. They may follow the command without
    this flag."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    toml: bool = False
    """Print the flags of each run as a file for --config-file instead."""


def show_runs(run: RunsRun) -> None:
    folders = [Path(n) if (Path(n) / RUN).is_file() else run.runs / n for n in run.names]
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise missing_run(missing[0])
    if not folders:
        records = sorted(run.runs.glob(f"*/{RUN}"), key=lambda path: path.stat().st_mtime)
        folders = [path.parent for path in records]
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


def differences(records: Sequence[RunRecord]) -> list[list[str]]:
    def shown(value: Any) -> str:
        return " ".join(map(str, value)) if isinstance(value, list) else str(value)

    options = [flat(record.configuration) for record in records]
    names = dict.fromkeys(name for one in options for name in one)
    rows = [[name.replace("_", "-"), *(shown(one.get(name)) for one in options)] for name in names]
    return [row for row in rows if row[0] != "name" and len(set(row[1:])) > 1]


def summary(folder: Path) -> list[str]:
    """One run as a row: how far it has come, how it goes, and what it measured last."""
    record = read_run(folder)
    with naming(folder / RUN, RunFolderError):
        steps: int = fitted(int, flat(record.configuration).get("steps"), "steps")
    rows = read_metrics(folder / "metrics.jsonl")
    saved = checkpoint.checkpoint_steps(folder / "checkpoints")
    step = max([row["step"] for row in rows] + saved, default=0)
    state = "done" if record.done is not None and record.done >= step else "stopped"
    if (folder / DIVERGED).exists():
        state = "diverged"
    # Nothing is made. NFS locks what is open to write; who may not write may read.
    path = folder / ".lock"
    with contextlib.suppress(OSError), path.open("r+" if os.access(path, os.W_OK) else "r") as file:
        if lock(file) is False:
            state = "running"
    measured = (
        {n: x for n, x in figures(row).items() if n.startswith(("validation_", "final_"))}
        for row in reversed(rows)
    )
    last = next(filter(None, measured), {})
    told = ", ".join(f"{name.split('_', 1)[1]} {value:.4g}" for name, value in last.items())
    return [folder.name, record.command, f"{step:,}/{steps:,}", state, told]


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


def load_model(folder: Path, device: torch.device) -> CausalLM:
    """The model of a run, or of one of its checkpoints, `runs/NAME/checkpoints/step-N`.

    A run that is not finished gives its newest checkpoint, with a note.
    """
    if not folder.is_dir():
        raise missing_run(folder)
    read_weights = partial(checkpoint.read_checkpoint, optimizer=False)
    if (folder / checkpoint.MARKER).exists():
        model = checkpoint_model(read_weights(folder).folder)
    # A model may lie alone in a folder, in one file or several.
    elif (folder / INDEX).exists() or (
        (folder / WEIGHTS).exists() and (not (folder / RUN).exists() or is_at_its_end(folder))
    ):
        model = CausalLM.load(folder)
    else:
        found = checkpoint.newest_checkpoint(folder / "checkpoints", read_weights)
        if found is None:
            read_run(folder)
            raise RunFolderError(f"{folder} has no checkpoint yet, and so no model")
        print(f"note: {folder} is not finished: this is its checkpoint of step {found.step:,}")
        model = checkpoint_model(found.folder)
    return model.to(device).eval()


def is_at_its_end(folder: Path) -> bool:
    steps, done = checkpoint.checkpoint_steps(folder / "checkpoints"), read_run(folder).done
    last = not steps or (done is not None and done >= steps[-1])
    return last and (folder / WEIGHTS).exists()


def run_of(folder: Path) -> Path:
    return folder.resolve().parents[1] if (folder / checkpoint.MARKER).exists() else folder


def checkpoint_model(folder: Path) -> CausalLM:
    """The model of a checkpoint, whether one process wrote it or many."""
    run = run_of(folder)
    fields = read_config(run)
    with naming(run / CONFIG):
        model = CausalLM(ModelConfig.from_fields(fields))
    checkpoint.fill(folder, dict(model.state_dict()))
    return model
