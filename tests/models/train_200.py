"""`python tests/models/train_200.py [NAMES]`: 200 steps of `deltarule train text` for every mixer.

A row of JSON for each: name, first and last loss in nats a byte, seconds, parameters; or the error.
"""

import contextlib
import dataclasses
import io
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
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
MODEL = ModelOptions()
WINDOW = 64


def train(name: str, *, steps: int = STEPS, data: str | None = None) -> dict[str, Any]:
    """One row: what the losses of a mixer did, without what comes after the training."""
    torch.set_num_threads(1)
    began = time.monotonic()
    window = WINDOW if MIXERS[name].takes("window") else None
    model = dataclasses.replace(MODEL, layer_types=(name,), window=window)
    with tempfile.TemporaryDirectory() as runs, contextlib.redirect_stdout(io.StringIO()):
        run = TextRun(
            data=data, name=name, runs=Path(runs), validation_bytes=2_000, curve_bytes=2_000,
            long_length=128, sample_bytes=0, model=model,
            loop=LoopOptions(steps=steps, save_every=steps, evaluate_every=0, device="cpu"),
        )  # fmt: skip
        try:
            folder = train_text(run)
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


def train_all(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of these mixers in their order, each trained in a process of one thread."""
    start = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=start) as pool:
        yield from pool.map(train, names)


if __name__ == "__main__":
    found = []
    for found_row in train_all(sys.argv[1:] or list(MIXERS)):
        print(json.dumps(found_row), flush=True)
        found.append(found_row)
        Path("train_200.json").write_text(json.dumps(found, indent=1) + "\n")
