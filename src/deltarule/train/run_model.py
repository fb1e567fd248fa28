"""The model of a run: what it wrote at its end, else its newest checkpoint."""

from pathlib import Path

import torch

from deltarule.models import CausalLM, ModelConfig
from deltarule.models.bytes import VOCAB_SIZE
from deltarule.models.files import CONFIG, WEIGHTS, naming, read_config
from deltarule.train.checkpoint import (
    MARKER,
    Checkpoint,
    checkpoint_steps,
    fill,
    newest_checkpoint,
    read_checkpoint,
)
from deltarule.train.run_folder import RUN, RunFolderError, read_run
from deltarule.train.runs import missing_run


def load_model(folder: Path, device: torch.device, *, of_bytes: bool = True) -> CausalLM:
    """The model of a run, or of one of its checkpoints, `runs/NAME/checkpoints/step-N`.

    A run that is not at its end gives its newest checkpoint, with a note.

    Raises:
        CheckpointError: The folder holds no model that can be read.
        RunFolderError: There is no run, or its model is not one of bytes where it should be.
    """
    if not folder.is_dir():
        raise missing_run(folder)
    if (folder / MARKER).exists():
        model = checkpoint_model(folder, read_checkpoint(folder, optimizer=False))
    # A model may lie alone in a folder.
    elif (folder / WEIGHTS).exists() and (not (folder / RUN).exists() or is_at_its_end(folder)):
        model = CausalLM.load(folder)
    else:
        found = newest_checkpoint(folder / "checkpoints", optimizer=False)
        if found is None:
            read_run(folder)
            raise RunFolderError(f"{folder} has no checkpoint yet, and so no model")
        print(f"note: {folder} is not at its end: this is its checkpoint of step {found.step:,}")
        model = checkpoint_model(folder / "checkpoints" / f"step-{found.step}", found)
    if of_bytes and model.config.vocab_size != VOCAB_SIZE:
        raise RunFolderError(
            f"{folder} holds a model of {model.config.vocab_size} tokens, not of bytes"
        )
    return model.to(device).eval()


def is_at_its_end(folder: Path) -> bool:
    """Whether the model is written, and no step was saved after it."""
    steps, done = checkpoint_steps(folder / "checkpoints"), read_run(folder).done
    last = not steps or (done is not None and done >= steps[-1])
    return last and (folder / WEIGHTS).exists()


def run_of(folder: Path) -> Path:
    """The folder of the run that a checkpoint's folder belongs to; a run's folder is its own."""
    return folder.resolve().parents[1] if (folder / MARKER).exists() else folder


def checkpoint_model(folder: Path, found: Checkpoint) -> CausalLM:
    """The model of a checkpoint, whether one process wrote it or many.

    Raises:
        CheckpointError: It is of another model than the run's config.json says.
    """
    run = run_of(folder)
    fields = read_config(run)
    with naming(run / CONFIG):
        model = CausalLM(ModelConfig.from_fields(fields))
    fill(folder, found, dict(model.state_dict()))
    return model
