"""`deltarule reproduce`: an experiment from its data to its report, and on after a stop."""

import math
import shlex
import shutil
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch

import deltarule
from bench.results import versions
from deltarule.config_file import flat
from deltarule.nearest import nearest
from deltarule.nn.checks import check_least
from deltarule.train.device import choose_device
from deltarule.train.extra import require
from deltarule.train.loop import InterruptedRunError
from deltarule.train.run_folder import locked
from experiments import records
from experiments.experiment import EXPERIMENTS, Cell, Experiment, Scale, finished, load_experiment
from experiments.pages import INDEX_PAGE, section, write_index, write_page
from experiments.processes import MachineError, OutOfTimeError, StoppedError, devices_of, run_cells
from experiments.records import Record, record_path, run_cell

CPU_WORKERS, GPU_WORKERS = 2, 8


@dataclass(frozen=True)
class ReproduceRun:
    """Run or continue an experiment of the papers, and report it beside the published figures.

    Finished cells are kept; after a stop, the same command continues.
    """

    name: str
    """An experiment of `deltarule reproduce --list`."""
    scale: Scale = "laptop"
    """laptop is a small form for two CPU cores; gpu is as near to the paper as minutes allow;
    published is the paper's own setting."""
    workers: int | None = None
    """Cells at a time, on all visible GPUs together; None is 2 on a CPU, with a thread each, and 8
    for each GPU."""
    only: tuple[str, ...] = ()
    """Run only cells whose names begin with one of these, in this order; * stands for any
    letters."""
    seconds: float | None = None
    """Stop after this many seconds; 0 runs nothing, and reports the finished cells."""
    retry: bool = False
    """Run failed cells again."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    data: str | None = None
    """For experiments on text: a file or a folder; None is the pinned text of the
    checkout, experiments/text.tar.xz."""
    device: str = "auto"
    """"cpu", "cuda:1", or "cuda" for all GPUs; "auto" takes those if PyTorch sees any."""
    publish: Path | None = None
    """Put figure, raw JSON and page into this folder too, such as docs/experiments."""

    def __post_init__(self) -> None:
        check_least(self, 1, "workers")


@dataclass(frozen=True)
class ListRun:
    """Say what each experiment shows and what it needs."""

    scale: Scale | Literal["all"] = "all"
    """Only what has this form."""


def list_experiments(run: ListRun) -> None:
    for name in EXPERIMENTS:
        words = load_experiment(name).words
        if run.scale != "all" and run.scale not in words.needs:
            continue
        told = [f"{words.title}. {words.shows}", f"From {words.source}."]
        told += [f"{scale:<10}{needs}" for scale, needs in words.needs.items()]
        text = "\n".join(textwrap.fill(line, 96, subsequent_indent=" " * 10) for line in told)
        print(f"{name}\n{textwrap.indent(text, '    ')}\n")


def reproduce(run: ReproduceRun) -> Path:
    """Run the cells that are not finished yet, then draw and report.

    The folder that is returned has cells/, figure.png, results.json and report.md. After a
    `MachineError`, such as a full disk, and after Ctrl-C or SIGTERM, what was finished is kept.
    """
    experiment = load_experiment(run.name)
    # Its figure comes last: what it needs should not be found missing then.
    require("matplotlib")
    cells = cells_of(run, experiment)
    folder = run.runs / f"reproduce-{run.name}-{run.scale}"
    with locked(folder):
        Reproduction(run, experiment, cells, folder).run()
    return folder


def chosen(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells that a pattern fits, in the order of the patterns; without patterns all."""
    fitting: list[Cell] = []
    for start in only or [""]:
        some = [cell for cell in cells if fnmatchcase(cell.name, f"{start}*")]
        if not some:
            hint = nearest(start, [cell.name for cell in cells], before=": ")
            raise ValueError(f"--only {start}: the name of no cell begins so{hint}")
        fitting += some
    return list(dict.fromkeys(fitting))


def device_for(run: ReproduceRun, experiment: Experiment, *, left: bool) -> torch.device:
    """The device, if what is left can run there; else a ValueError says what would."""
    device = choose_device(run.device)
    if left and run.scale != "laptop" and device.type != "cuda":
        other = "; --scale laptop runs without" if "laptop" in experiment.words.needs else ""
        seen = "PyTorch sees none here" if run.device == "auto" else f"--device is {run.device}"
        raise ValueError(f"{run.name} --scale {run.scale} needs a CUDA GPU, and {seen}{other}")
    return device


def cells_of(run: ReproduceRun, experiment: Experiment) -> list[Cell]:
    """The cells, on the given text if there is one and they read text."""
    if run.scale not in experiment.words.needs:
        forms = " or ".join(f"--scale {scale}" for scale in experiment.words.needs)
        raise ValueError(f"{run.name} has no form for --scale {run.scale}, only {forms}")
    cells: list[Any] = list(experiment.cells(run.scale))
    if run.data is None:
        return cells
    if not all(hasattr(cell, "data") for cell in cells):
        raise ValueError(f"--data {run.data}: {run.name} does not train on text; leave it out")
    return [replace(cell, data=run.data) for cell in cells]


class Reproduction:
    """An experiment on its way: which cells are finished, and what is said of them."""

    def __init__(
        self, run: ReproduceRun, experiment: Experiment, cells: list[Cell], folder: Path
    ) -> None:
        self.options, self.experiment, self.cells = run, experiment, cells
        self.folder = folder
        self.records = finished_records(folder, cells, retry=run.retry)
        self.grows = experiment.forms[run.scale].get("grows", False)
        if self.grows and run.publish is not None:
            self.records = published_records(run, cells) | self.records
        self.before = len(self.records)
        left = [cell for cell in chosen(cells, run.only) if cell.name not in self.records]
        self.left = [] if run.seconds == 0 else left
        self.device = device_for(run, experiment, left=bool(self.left))
        self.devices = devices_of(self.device, torch.cuda.device_count())
        default = GPU_WORKERS * len(self.devices) if self.device.type == "cuda" else CPU_WORKERS
        self.workers = 1 if experiment.timed else run.workers or default

    def run(self) -> None:
        began, seconds = time.monotonic(), self.options.seconds
        words, scale = self.experiment.words, self.options.scale
        print(f"{words.title}, {scale} form: {words.needs[scale]}")
        print(f"{self.kept()}, {len(self.left)} to run in {self.folder}", flush=True)
        try:
            timed = self.experiment.timed
            if self.workers == 1 and not timed and seconds is None:
                # In this process, each with its own progress bar.
                for cell in self.left:
                    self.tell(cell, None)
                    self.tell(cell, run_cell(cell, self.folder, self.device))
            else:
                at = self.folder, self.devices, began + (seconds or math.inf)
                run_cells(self.left, *at, workers=self.workers, tell=self.tell, afresh=timed)
        except OutOfTimeError:
            print(f"the {seconds:g} seconds are over: {self.kept()}; the same command continues")
            return
        except (StoppedError, InterruptedRunError):
            print(f"{self.kept()}; the same command continues", flush=True)
            raise KeyboardInterrupt from None
        except (MachineError, *records.ENVIRONMENT) as error:
            raise MachineError(f"{error}; {self.kept()}, and the same command continues") from error
        if len(self.records) == len(self.cells) or (self.grows and self.records):
            self.report(time.monotonic() - began)
        else:
            print(f"{self.kept()}; the report follows when all of them are")

    def tell(self, cell: Cell, record: Record | None) -> None:
        if record is None:
            print(f"{cell.name}: started", flush=True)
            return
        self.records[cell.name] = record
        count = f"[{len(self.records)}/{len(self.cells)}]"
        error, found = record["error"], flat(record["figures"]).items()
        numbers = [f"{name} {x:.4g}" for name, x in found if isinstance(x, int | float)]
        outcome = ", ".join(numbers[:3]) if error is None else f"FAILED, {error}"
        print(f"{count} {cell.name}: {outcome} ({record['seconds']:,.0f} s)", flush=True)

    def kept(self) -> str:
        count = sum(record_path(self.folder, cell).exists() for cell in self.cells)
        return f"{count} of {len(self.cells)} cells are finished"

    def report(self, seconds: float) -> None:
        experiment, scale, words = self.experiment, self.options.scale, self.experiment.words
        found = [self.records[cell.name] for cell in self.cells if cell.name in self.records]
        picture = None
        if done := finished(records.to_results(found)):
            picture = "figure.png"
            experiment.draw(scale, done, self.folder / picture)
        # Of the cells, which may have run elsewhere.
        ran_with = next((one["versions"] for one in found if "versions" in one), versions())
        whole = {
            "format": records.FORMAT, "deltarule": deltarule.__version__,
            "experiment": experiment.name, "scale": scale,
            "date": datetime.now(UTC).isoformat(timespec="minutes"),
            "command": command_line(self.options), "versions": ran_with, "workers": self.workers,
            "seconds": round(seconds, 1), "from_before": self.before,
            "deviations": words.deviations.get(scale, []), "cells": found,
        }  # fmt: skip
        records.write_json(self.folder / "results.json", whole)
        lines = section(experiment, whole, raw="results.json", picture=picture)
        text = "\n".join([f"# {words.title}", "", words.shows, "", *lines]) + "\n"
        (self.folder / "report.md").write_text(text, encoding="utf-8")
        print(f"\n{text}\nreport: {self.folder / 'report.md'}")
        if self.options.publish is not None:
            self.publish(self.options.publish, picture)

    def publish(self, target: Path, picture: str | None) -> None:
        """Copy figure and results, and write the page anew, and the index if there is one."""
        target.mkdir(parents=True, exist_ok=True)
        raw = published_path(self.options, target)
        shutil.copyfile(self.folder / "results.json", raw)
        if picture is not None:
            shutil.copyfile(self.folder / picture, raw.with_suffix(".png"))
        write_page(self.experiment, target)
        if (target / INDEX_PAGE).exists():
            write_index(target)
        print(f"page: {target / self.experiment.name}.md")


def finished_records(folder: Path, cells: list[Cell], *, retry: bool) -> dict[str, Record]:
    """Records of an earlier run by the names of their cells; without failed ones to retry."""
    found = {}
    for cell in cells:
        if not (path := record_path(folder, cell)).exists():
            continue
        record = records.checked(path, cell)
        if retry and record["error"] is not None:
            path.unlink()
            shutil.rmtree(records.own_folder(folder, cell), ignore_errors=True)
        else:
            found[cell.name] = record
    return found


def published_path(run: ReproduceRun, target: Path) -> Path:
    return target / f"{run.name}-{run.scale}.json"


def published_records(run: ReproduceRun, cells: list[Cell]) -> dict[str, Record]:
    """Published cells whose settings still hold."""
    path, found = published_path(run, run.publish or Path()), {}
    ours = {cell.name: cell for cell in cells}
    for record in records.read_json(path)["cells"] if path.exists() else ():
        told = record["cell"]
        cell = ours.get(told["name"])
        if cell and records.completed(told, cell) == records.plain(cell):
            found[cell.name] = record
    return found


def command_line(run: ReproduceRun) -> str:
    """The command that gives these results."""
    words = ["deltarule", "reproduce", run.name, "--scale", run.scale]
    words += [] if run.workers is None else ["--workers", str(run.workers)]
    words += [] if run.data is None else ["--data", run.data]
    words += [] if run.device == "auto" else ["--device", run.device]
    return shlex.join(words)
