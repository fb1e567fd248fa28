"""One cell from its start, or from where it was stopped, to its record on disk."""

import json
import shutil
import time
from pathlib import Path

import torch
from safetensors import SafetensorError

from bench.results import versions
from deltarule.models import CheckpointError
from deltarule.train.extra import MissingExtraError
from deltarule.train.loop import InterruptedRunError
from experiments.experiment import Cell
from experiments.records import Record, checked, header, machine, write_json

# These say something of the machine and nothing of the experiment: no cell has failed by them.
ENVIRONMENT = (OSError, SafetensorError, CheckpointError, MissingExtraError)


def own_folder(folder: Path, cell: Cell) -> Path:
    """Folder in which a cell keeps what it needs to continue."""
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
    figures, error = attempt(cell, own, device)
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


def attempt(cell: Cell, own: Path, device: torch.device) -> tuple[Record, str | None]:
    """The figures of a cell, or why it failed."""
    try:
        figures = cell.run(own, device)
    except (*ENVIRONMENT, InterruptedRunError):
        raise
    except Exception as error:
        return {}, f"{type(error).__name__}: {error}"
    try:
        return json.loads(json.dumps(figures, allow_nan=False)), None
    except ValueError:
        return {}, f"there is nan or infinity in what it found: {figures}"
