"""A cell from its start, or from where it was stopped, to its record; the JSON files of records.

A finished cell has a file of its own, and an experiment one for all of them together.
"""

import dataclasses
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

import deltarule
from bench.results import versions
from deltarule.atomic_file import write_text
from deltarule.models import CheckpointError
from deltarule.train.extra import MissingExtraError
from deltarule.train.loop import InterruptedRunError
from experiments.experiment import Cell, Result

Record = dict[str, Any]

# Goes up when files of before can no longer be read.
FORMAT = 1
# These say something of the machine and nothing of the experiment: no cell has failed by them.
ENVIRONMENT = (OSError, SafetensorError, CheckpointError, MissingExtraError)
START_ANEW = "move the folder away, or choose another --runs, to start anew"


class RecordError(ValueError):
    """A file of results is damaged, or of another version or configuration."""


def own_folder(folder: Path, cell: Cell) -> Path:
    """Folder in which a cell keeps what it needs to continue; its record lies beside it."""
    return folder / "cells" / cell.name


def record_path(folder: Path, cell: Cell) -> Path:
    return folder / "cells" / f"{cell.name}.json"


def run_cell(cell: Cell, folder: Path, device: torch.device) -> Record:
    """Run one cell, or go on with it, and write its record, which says why if it failed.

    A `RecordError` says that another version or configuration began it. An `InterruptedRunError`
    leaves a checkpoint; it passes, and so do the errors of `ENVIRONMENT`.
    """
    began = time.monotonic()
    own = own_folder(folder, cell)
    own.mkdir(parents=True, exist_ok=True)
    begun = own / "cell.json"
    if begun.exists():
        checked(begun, cell)
    else:
        write_json(begun, header(cell))
    figures: Record = {}
    error = None
    try:
        figures = cell.run(own, device)
    except (*ENVIRONMENT, InterruptedRunError):
        raise
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    try:
        figures = json.loads(json.dumps(figures, allow_nan=False))
    except ValueError:
        figures, error = {}, f"there is nan or infinity in what it found: {figures}"
    record = make_record(cell, figures, error, time.monotonic() - began, device)
    write_json(record_path(folder, cell), record)
    # What is finished needs no checkpoint, and those of many cells would fill a disk.
    shutil.rmtree(own / "checkpoints", ignore_errors=True)
    return record


def make_record(
    cell: Cell, figures: Record, error: str | None, seconds: float, device: torch.device
) -> Record:
    outcome = {"figures": figures, "error": error, "seconds": round(seconds, 1)}
    where = {"machine": machine(device), "threads": torch.get_num_threads(), "versions": versions()}
    return header(cell) | outcome | where


def header(cell: Cell) -> Record:
    return {"format": FORMAT, "deltarule": deltarule.__version__, "cell": plain(cell)}


def plain(value: Any) -> Any:
    """A dataclass as JSON gives it back: tuples are lists."""
    return json.loads(json.dumps(value, default=dataclasses.asdict))


def write_json(path: Path, content: Record) -> None:
    """Write a file whole or not at all; nan and infinity, which JSON lacks, are refused."""
    # A line for each entry of the whole: long lists of numbers would else fill a page each.
    entries = [f"{json.dumps(key)}: {json.dumps(content[key], allow_nan=False)}" for key in content]
    text = "{\n" + ",\n".join(entries) + "\n}\n"
    write_text(path, text)


def read_json(path: Path) -> Record:
    """Read a file of results of this format, or name the version that wrote another."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(f"{path}: damaged: {error}; remove it to run it again") from None
    if not isinstance(content, dict) or "format" not in content:
        raise RecordError(f"{path}: this is no file of results; remove it")
    if content["format"] != FORMAT:
        raise RecordError(
            f"{path}: results of format {content['format']}, written by deltarule "
            f"{content.get('deltarule', 'of an unknown version')}; this is deltarule "
            f"{deltarule.__version__}, which reads format {FORMAT}: {START_ANEW}"
        )
    return content


def checked(path: Path, cell: Cell) -> Record:
    """Read a file that belongs to a cell, finished or begun; a `RecordError` says what differs."""
    record, ours = read_json(path), header(cell)
    if record.get("deltarule") != ours["deltarule"]:
        raise RecordError(
            f"{path}: written by deltarule {record.get('deltarule')}, but this is deltarule "
            f"{ours['deltarule']}: {START_ANEW}"
        )
    told = completed(record.get("cell"), cell)
    if told != ours["cell"]:
        name, theirs, wanted = difference(told, ours["cell"])
        raise RecordError(
            f"{path}: of another configuration, {name} is {theirs!r} there and {wanted!r} here: "
            f"{START_ANEW}"
        )
    return record


def completed(told: Any, ours: Any) -> Any:
    """A configuration from a file, with the defaults of fields that are newer than the file."""
    if isinstance(told, dict) and dataclasses.is_dataclass(ours):
        known = {name: completed(of, getattr(ours, name, None)) for name, of in told.items()}
        newer = [field for field in dataclasses.fields(ours) if field.name not in told]
        defaults = {field.name: field.default for field in newer}
        missing = dataclasses.MISSING
        return known | {name: plain(of) for name, of in defaults.items() if of is not missing}
    if isinstance(told, list) and isinstance(ours, list | tuple) and len(told) == len(ours):
        return [completed(one, of) for one, of in zip(told, ours, strict=True)]
    return told


def difference(theirs: Any, ours: Any, name: str = "") -> tuple[str, Any, Any]:
    """The first place where two configurations differ, and what stands there."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in [*ours, *theirs]:
            if theirs.get(key) != ours.get(key):
                return difference(theirs.get(key), ours.get(key), f"{name}.{key}".lstrip("."))
    return name or "the cell", theirs, ours


def to_results(records: Sequence[Record]) -> list[Result]:
    return [Result(x["cell"]["name"], x["cell"], x["figures"], x["error"]) for x in records]


def machine(device: torch.device) -> str:
    """What computes, in words: the CPU by its own name where the system tells it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    name, cores = found[1] if found else platform.processor() or platform.machine(), os.cpu_count()
    processor = f"{name}, {cores} core{'' if cores == 1 else 's'}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}; {processor}"
    return processor if device.type == "cpu" else f"{device.type} of {processor}"
