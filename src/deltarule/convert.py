"""`deltarule convert`: a checkpoint in the layout of another family, from a shell."""

from dataclasses import dataclass
from pathlib import Path

from deltarule.models.config import MODEL_TYPE
from deltarule.models.convert.copy import convert
from deltarule.train.progress import PERCENT, make_progress
from deltarule.train.run_folder import RUN, line_that_resumes
from deltarule.train.runs import is_at_its_end, run_of


@dataclass(frozen=True)
class ConvertRun:
    """Write a checkpoint in the layout of another family, one tensor in memory at a time."""

    source: Path
    """Folder with config.json and model.safetensors, or its shards and their index."""
    destination: Path
    """Folder to make; it appears when it is complete."""
    to: str = MODEL_TYPE
    """The family to write, such as gated_deltanet or mamba2; deltarule is this library's own."""
    shard_gb: float = 5.0
    """Largest size of one file of weights, in 10^9 bytes."""


def convert_folder(run: ConvertRun) -> None:
    """Convert, with a bar that counts bytes; an error leaves nothing behind."""
    if not run.shard_gb > 0:
        raise ValueError(f"--shard-gb must be above 0, got {run.shard_gb}")
    if (whole := run_of(run.source)) != run.source:
        raise ValueError(
            f"{run.source} is a checkpoint within a run, without a config.json of its own: finish "
            f"the run, and convert {whole}"
        )
    if (run.source / RUN).exists() and not is_at_its_end(run.source):
        how = line_that_resumes(run.source)
        raise ValueError(f"{run.source}: this run is not finished; finish it with: {how}")
    size = int(run.shard_gb * 1e9)
    with make_progress(PERCENT, what="percent") as bar:
        convert(run.source, run.destination, run.to, shard_size=size, progress=bar.update_bytes)
    print(f"{run.destination}: written as {run.to}")
