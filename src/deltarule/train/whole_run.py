"""A run from its first step to its last figures: trained, saved, measured, and how it goes on."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from deltarule.models import CausalLM, ModelConfig
from deltarule.parallel import World
from deltarule.train import run_folder
from deltarule.train.checkpoint import seed_everything
from deltarule.train.figures import loss_curve
from deltarule.train.job import Job
from deltarule.train.loop import Trainer
from deltarule.train.metrics import Metrics, read_metrics, sinks
from deltarule.train.progress import for_screen


def whole_run(
    run: Any,
    command: str,
    default: str,
    config: ModelConfig,
    job: Job,
    describe: Callable[[Path], None],
    finish: Callable[[Trainer], None],
    *,
    world: World,
    began: float,
    data: run_folder.DataFacts | None = None,
    reserve: Callable[[float], float] | None = None,
) -> Path:
    """Train a model on a job, save it, the best where that was kept; return the run's folder.

    The run is that of `open_run`, with a `watch` and an `optimizer`. The first process alone
    describes what is given, and in the end measures, draws and prints what has come of it. The
    command began at `began`; `reserve` is that of a `Trainer`.
    """
    with (
        run_folder.open_run(run, command, default, world, data) as folder,
        sinks(run.watch.log, folder, first=world.first) as also,
    ):
        seed_everything(run.loop.seed)
        model = CausalLM(config)
        if world.first:
            describe(folder)
            count, parameters = len(model.blocks), sum(p.numel() for p in model.parameters())
            layers = f"{count} layer{'s' if count > 1 else ''} of {layers_of(model)}"
            print(for_screen(f"model   {layers}, {parameters:,} parameters"))
        trainer = Trainer(
            model, job, options=run.loop, optimizer_options=run.optimizer, folder=folder,
            resume=run.resume or world.attempt > 0, patience=run.watch.patience, began=began,
            reserve=reserve, also=also, world=world,
        )  # fmt: skip
        complete = trainer.run()
        taken = trainer.take_best()
        save_model(trainer)
        if world.first:
            if taken != trainer.step:
                print(f"the model is that of step {taken:,}, the best of the short evaluations")
            if complete:
                record = run_folder.read_run(folder)
                run_folder.write_run(folder, replace(record, done=trainer.step))
            finish(trainer)
            print(f"done in {time.monotonic() - began:.0f} s: {folder}")
            if not complete:
                line = run_folder.line_that_resumes(folder)
                print(f"continue it with:\n  {line} --max-seconds None")
    return folder


def keep_figures(
    trainer: Trainer, final: dict[str, float], picture: str, measure: str, levels: dict[str, float]
) -> None:
    """Add the last figures of a run to its metrics, and draw its course as `loss_curve` does."""
    path = trainer.folder / "metrics.jsonl"
    with Metrics(path, after=trainer.step, end=True, also=trainer.also) as metrics:
        metrics.write({"step": trainer.step} | {f"final_{name}": x for name, x in final.items()})
    title = f"Training of {trainer.folder.name}: {layers_of(trainer.model)}"
    loss_curve(read_metrics(path), trainer.folder / picture, measure, levels, title)


def layers_of(model: CausalLM) -> str:
    return ", ".join(dict.fromkeys(model.config.layer_types))


def save_model(trainer: Trainer) -> None:
    """Write the model whole; the first process then goes on with all of it."""
    if (plan := trainer.spread.plan) is None:
        trainer.model.save(trainer.folder)
        return
    from deltarule.train.sharded_checkpoint import write_model

    write_model(trainer.model, trainer.folder, trainer.world, plan.stepped)
    if trainer.world.first:
        trainer.model = CausalLM.load(trainer.folder, device=trainer.device)
