"""Runs of `train text` on the processes of a group, small enough for seconds."""

import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltarule.errors import DivergedError
from deltarule.models import CausalLM
from deltarule.parallel import MeshOptions, World
from deltarule.train.data import Spans, encode_documents
from deltarule.train.loop import InterruptedRunError, LoopOptions, Trainer
from deltarule.train.optimizer import OptimizerOptions
from deltarule.train.text import ModelOptions, TextJob, TextRun, train_text

LAYERS = ("gated_deltanet", "gated_delta_product")


def text_run(folder: str, **options: Any) -> TextRun:
    """Four rows a step, of pieces longer and shorter than them."""
    mesh = {
        name: options.pop(name) for name in ("replicate", "context", "tensor") if name in options
    }
    data = Path(folder) / options.pop("data", "corpus.txt")
    resume, heads = options.pop("resume", False), options.pop("num_heads", 2)
    loop = {"steps": 50, "accumulate": 4, "save_every": 20, "evaluate_every": 25, **options}
    return TextRun(
        data=str(data), runs=Path(folder), name="run", resume=resume,
        length=24, batch_tokens=256, validation_bytes=600, long_length=48, sample_bytes=8,
        mesh=MeshOptions(**mesh), loop=LoopOptions(device="cpu", **loop),
        optimizer=OptimizerOptions(warmup_steps=5),
        model=ModelOptions(
            LAYERS, num_layers=2, hidden_size=48, num_heads=heads, head_k_dim=8, head_v_dim=8
        ),
    )  # fmt: skip


def train(folder: str, **options: Any) -> None:
    train_text(text_run(folder, **options))


class FaultyJob(TextJob):
    """Something happens to one process before its n-th row."""

    def __init__(self, *given: Any, fault: str, rank: int, row: int) -> None:
        super().__init__(*given)
        self.fault, self.left = fault, row
        self.strikes = rank == int(os.environ["RANK"])

    def next(self) -> Spans:
        self.left -= 1
        if self.left == 0 and self.strikes and self.fault == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.left == 0 and self.strikes and self.fault == "full disk":
            # From now on this process writes no file of more than a kilobyte.
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        return super().next()

    def loss(self, model: CausalLM, *tensors: Tensor) -> Any:
        loss, shown = super().loss(model, *tensors)
        if self.left <= 0 and self.strikes and self.fault == "nan":
            loss = loss * torch.nan
        return loss, shown


def trainer_of(run: TextRun, patience: int = 0, **fault: Any) -> Trainer:
    """A run on a short text, to which something may happen."""
    world = World(torch.device("cpu"), run.mesh)
    corpus = encode_documents([b"some words and others " * 200])
    given = run, corpus, corpus, world
    return Trainer(
        CausalLM(run.model.config()), FaultyJob(*given, **fault) if fault else TextJob(*given),
        options=run.loop, optimizer_options=run.optimizer, folder=run.runs, world=world,
        patience=patience,
    )  # fmt: skip


def with_fault(folder: str, fault: str, rank: int, row: int) -> dict[str, Any]:
    """How a run ends, and whether all of its weights are numbers still."""
    run = text_run(folder, steps=6, save_every=2, evaluate_every=0)
    trainer, ended = trainer_of(run, fault=fault, rank=rank, row=row), ""
    try:
        trainer.run()
        trainer.checkpoints.wait()
    except (DivergedError, InterruptedRunError, OSError) as error:
        ended = f"{type(error).__name__}: {error}"
    finally:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    weights = [p.to_local() for p in trainer.model.parameters()]
    finite = all(bool(torch.isfinite(x).all()) for x in weights)
    return {"ended": ended, "finite": finite}


def best_of(folder: str, values: list[float]) -> tuple[int, bool]:
    """The step whose model is taken after short evaluations of these values, and whether it is."""
    run = text_run(folder, steps=len(values), save_every=1, evaluate_every=1)
    trainer, kept, left = trainer_of(run, patience=len(values)), {}, iter(values)

    def evaluate(model: CausalLM) -> dict[str, float]:
        kept[trainer.step] = model.embedding.weight.to_local().detach().clone()
        return {"validation_bits_per_byte": next(left)}

    trainer.job.evaluate = evaluate
    trainer.run()
    step = trainer.take_best()
    return step, torch.equal(trainer.model.embedding.weight.to_local(), kept[step])


def with_bad_data(folder: str) -> str:
    """What all processes say when one of them does not find the data."""
    run = text_run(folder)
    if int(os.environ["RANK"]) == 1:
        run = TextRun(data=str(Path(folder) / "missing.txt"), runs=Path(folder), mesh=run.mesh)
    try:
        train_text(run)
    except ValueError as error:
        return str(error)
    return ""
