"""The model of a run: what it wrote at its end, else its newest checkpoint."""

from pathlib import Path

import torch

from deltarule.models import CausalLM, ModelConfig
from deltarule.models.bytes import VOCAB_SIZE
from deltarule.models.files import CONFIG, WEIGHTS, naming, read_config
from deltarule.train import checkpoint
from deltarule.train.run_folder import RUN, RunFolderError, read_run
from deltarule.train.runs import missing_run


def load_model(folder: Path, device: torch.device, *, of_bytes: bool = True) -> CausalLM:
    """The model of a run, or of one of its checkpoints, `runs/NAME/checkpoints/step-N`.

    A run that is not at its end gives its newest checkpoint, with a note.
    """
    if not folder.is_dir():
        raise missing_run(folder)
    if (folder / checkpoint.MARKER).exists():
        model = checkpoint_model(folder, checkpoint.read_checkpoint(folder, optimizer=False))
    # A model may lie alone in a folder.
    elif (folder / WEIGHTS).exists() and (not (folder / RUN).exists() or is_at_its_end(folder)):
        model = CausalLM.load(folder)
    else:
        found = checkpoint.newest_checkpoint(folder / "checkpoints", optimizer=False)
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
    steps, done = checkpoint.checkpoint_steps(folder / "checkpoints"), read_run(folder).done
    last = not steps or (done is not None and done >= steps[-1])
    return last and (folder / WEIGHTS).exists()


def run_of(folder: Path) -> Path:
    return folder.resolve().parents[1] if (folder / checkpoint.MARKER).exists() else folder


def checkpoint_model(folder: Path, found: checkpoint.Checkpoint) -> CausalLM:
    """The model of a checkpoint, whether one process wrote it or many."""
    run = run_of(folder)
    fields = read_config(run)
    with naming(run / CONFIG):
        model = CausalLM(ModelConfig.from_fields(fields))
    checkpoint.fill(folder, found, dict(model.state_dict()))
    return model
