"""A run from its first step to its last figures: trained, saved, measured, and how it goes on."""

import time
from collections.abc import Callable

from deltarule.models import CausalLM
from deltarule.train.loop import Trainer
from deltarule.train.run_folder import line_that_resumes, mark_done


def train_and_finish(trainer: Trainer, finish: Callable[[], None], began: float) -> None:
    """Train, save the model, which is the best where that was kept, and let one process finish.

    `finish` measures `trainer.model`, draws and prints; the command began at `began`.
    """
    complete, folder = trainer.run(), trainer.folder
    taken = trainer.take_best()
    save_model(trainer)
    if not trainer.spread.first:
        return
    if taken != trainer.step:
        print(f"the model is that of step {taken:,}, the best of the short evaluations")
    if complete:
        mark_done(folder, trainer.step)
    finish()
    print(f"done in {time.monotonic() - began:.0f} s: {folder}")
    if not complete:
        print(f"it goes on with:\n  {line_that_resumes(folder)} --max-seconds None")


def layers_of(model: CausalLM) -> str:
    return ", ".join(dict.fromkeys(model.config.layer_types))


def model_line(model: CausalLM) -> str:
    count, parameters = len(model.blocks), sum(p.numel() for p in model.parameters())
    layers = "1 layer" if count == 1 else f"{count} layers"
    return f"model   {layers} of {layers_of(model)}, {parameters:,} parameters"


def save_model(trainer: Trainer) -> None:
    """Write the model whole; the first process then goes on with all of it."""
    world, plan = trainer.spread.world, trainer.spread.plan
    if world is None or plan is None:
        trainer.model.save(trainer.folder)
        return
    from deltarule.parallel.shard_files import write_model

    write_model(trainer.model, trainer.folder, world, plan.stepped)
    if world.first:
        trainer.model = CausalLM.load(trainer.folder, device=trainer.device)
