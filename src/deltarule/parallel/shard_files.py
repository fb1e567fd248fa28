"""Tensors that processes hold in parts, in safetensors files that any number of them can read.

Every process writes what it holds, and the header of each file says where in the whole tensors its
parts lie. There is no other metadata, and nothing is pickled or unpickled from disk.
"""

import shutil
import warnings
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor, distribute_tensor

from deltarule.atomic_file import sync
from deltarule.models import CausalLM
from deltarule.models.files import CONFIG, WEIGHTS, CheckpointError
from deltarule.parallel.world import World

Tensors = dict[str, Tensor]


def write_shards(folder: Path, tensors: Tensors, group: dist.ProcessGroup) -> Future[Any]:
    """Begin to write what each process holds; the tensors may change as soon as this returns.

    All see the empty folder, and what is no DTensor is alike on all. The group is on gloo, and used
    by nothing else until what is returned is done: every process has written its files then.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    done = async_save(tensors, storage_writer=writer, process_group=group)
    assert isinstance(done, Future)
    return done


def own_files(folder: Path, rank: int) -> list[Path]:
    """What the process of this rank has written."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))


def read_shards(folder: Path, tensors: Tensors) -> None:
    """Fill tensors in place from what any number of processes, or one alone, have written.

    A `CheckpointError` names a tensor that is missing, or of another shape than the model's.
    """
    reader = HuggingFaceStorageReader(str(folder))
    try:
        with warnings.catch_warnings():
            # That one process alone reads is meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{folder}: not a checkpoint of this model: {reason}") from None


def as_written(tensors: Tensors, stepped: Collection[str]) -> Tensors:
    """The tensors, moments among them, in the shapes that they have in one process.

    `stepped` are names of parameters that are split with an axis of steps; see `split_heads`.
    """
    return {
        name: whole(tensor).flatten(0, 1) if parameter_of(name) in stepped else tensor
        for name, tensor in tensors.items()
    }


def take_written(tensors: Tensors, read: Tensors, stepped: Collection[str]) -> None:
    """Give what was read in the shapes of one process to the tensors that `as_written` changed."""
    for name, tensor in tensors.items():
        if parameter_of(name) in stepped:
            value = read[name].view(tensor.shape)
            if isinstance(tensor, DTensor):
                mesh, placements = tensor.device_mesh, tensor.placements
                value = distribute_tensor(value, mesh, placements, src_data_rank=None)
            with torch.no_grad():
                tensor.copy_(value)


def parameter_of(name: str) -> str:
    """The parameter that a tensor of the model or of the optimizer belongs to."""
    return name.rpartition("/")[2]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def write_model(model: CausalLM, folder: Path, world: World, stepped: Collection[str] = ()) -> None:
    """Write the folder that `CausalLM.load` opens; no process holds the whole model for it."""
    aside = folder / ".model.tmp"
    tensors = as_written(dict(model.state_dict()), stepped)

    def prepare() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    def publish() -> None:
        merged = aside / "model-00001-of-00001.safetensors"
        sync(merged)
        merged.rename(folder / WEIGHTS)
        (folder / CONFIG).write_text(model.config.to_json())
        shutil.rmtree(aside)

    world.from_first(prepare)
    names = dict.fromkeys(tensors, 1)
    writer = HuggingFaceStorageWriter(
        str(aside), fqn_to_index_mapping=names, save_distributed=True, enable_consolidation=True
    )
    save(tensors, storage_writer=writer)
    dist.barrier()
    world.from_first(publish)
