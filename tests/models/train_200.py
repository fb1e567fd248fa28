"""`python tests/models/train_200.py`: 200 steps of `deltarule train text` for every row of MIXERS.

A row of JSON for each: name, first and last loss in nats a byte, seconds, parameters; or the error.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deltarule.models.files import read_places
from deltarule.nn import MIXERS
from deltarule.train.loop import LoopOptions
from deltarule.train.metrics import read_metrics
from deltarule.train.text import ModelOptions, TextRun, train_text

STEPS = 200
# The last loss is a mean over so many steps: one batch of text is easier than another.
LAST = 10
# The command's own model; the window is within the 128 tokens of a piece.
MODEL = ModelOptions(window=64)


def text_run(name: str, runs: Path, *, steps: int = STEPS, data: str | None = None) -> TextRun:
    """`deltarule train text` with one mixer and without what comes after the training."""
    return TextRun(
        data=data,
        name=name,
        runs=runs,
        validation_bytes=2_000,
        curve_bytes=2_000,
        long_length=128,
        sample_bytes=0,
        model=dataclasses.replace(MODEL, layer_types=(name,)),
        loop=LoopOptions(steps=steps, save_every=steps, evaluate_every=0, device="cpu"),
    )


def train(name: str, *, steps: int = STEPS, data: str | None = None) -> dict[str, Any]:
    """One row: what the losses of a mixer did."""
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as runs, contextlib.redirect_stdout(io.StringIO()):
        try:
            folder = train_text(text_run(name, Path(runs), steps=steps, data=data))
        except Exception as error:
            return {"name": name, "error": f"{type(error).__name__}: {error}"}
        rows = read_metrics(folder / "metrics.jsonl")
        shapes = [place.shape for place in read_places(folder).values()]
    losses = [row["loss"] for row in rows if "loss" in row]
    return {
        "name": name, "parameters": sum(map(math.prod, shapes)), "steps": len(losses),
        "first_loss": losses[0], "last_loss": statistics.fmean(losses[-LAST:]),
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def train_all(
    names: list[str], workers: int, *, steps: int = STEPS, data: str | None = None
) -> Iterator[dict[str, Any]]:
    """The rows of these mixers in their order, each trained in a process of one thread."""
    start = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=start) as pool:
        yield from pool.map(partial(train, steps=steps, data=data), names)


def main() -> None:
    """Train the rows asked for and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="mixers; default: all of them")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--data", help="a text file or folder; default: the standard library")
    parser.add_argument("--output", type=Path, default=Path("train_200.json"))
    options = parser.parse_args()
    names = options.names or list(MIXERS)
    rows = []
    for row in train_all(names, options.workers, steps=options.steps, data=options.data):
        print(json.dumps(row), flush=True)
        rows.append(row)
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
