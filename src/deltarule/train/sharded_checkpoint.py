"""Checkpoints of a run on several processes: the same folders, a file for each process's part.

Writing goes on beside the next steps. As on one process, a `step-N` is whole or not there: parts
are written aside, synced and hashed by those who wrote them, and one rename makes them visible. The
header of each file says where in the whole tensors its parts lie, so that any number of processes
can read them. There is no other metadata, and nothing is pickled or unpickled from disk.
"""

import json
import shutil
import threading
import warnings
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
from deltarule.parallel import World
from deltarule.parallel.world import broadcast
from deltarule.train import checkpoint


class ShardedCheckpoints(checkpoint.Checkpoints):
    """`Checkpoints` of a run whose tensors lie on several processes, which all see the folder.

    Any number of processes reads what any other has written. Parameters named `stepped` are split
    with an axis of steps; see `split_heads`.
    """

    def __init__(
        self, folder: Path, *, keep: int, world: World, stepped: Collection[str] = ()
    ) -> None:
        # The first process makes the folder and removes what was left in it; the others find that.
        world.from_first(lambda: checkpoint.Checkpoints(folder, keep=keep).steps())
        super().__init__(folder, keep=keep)
        self.world, self.stepped = world, stepped
        # Of its own: collectives of two threads must not meet.
        self.group = dist.new_group(backend="gloo", timeout=world.timeout)
        self.writing: threading.Thread | None = None
        self.made = ExitStack()
        self.failure: BaseException | None = None

    def save(self, step: int, tensors: checkpoint.Tensors, state: dict[str, Any]) -> Path:
        """Begin to write one checkpoint, once the one before is there.

        What is no DTensor is alike on all processes, and all may change when this returns.
        """
        self.wait()
        # Made and moved into place by the first process.
        aside = Path(self.world.from_first(lambda: str(self.made.enter_context(self.new(step)))))
        written = async_save(
            as_written(tensors, self.stepped), process_group=self.group,
            storage_writer=HuggingFaceStorageWriter(str(aside), save_distributed=True),
        )  # fmt: skip
        arguments = written, aside, step, json.dumps(state)
        self.writing = threading.Thread(target=self._finish, args=arguments)
        self.writing.start()
        return self.folder / f"step-{step}"

    def wait(self) -> None:
        """Wait until every process has its part of the last checkpoint on disk."""
        if self.writing is not None:
            self.writing.join()
            self.writing = None
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise OSError(f"{self.folder}: the checkpoint was not written: {failure}")

    def _finish(self, written: Future[Any], aside: Path, step: int, state: str) -> None:
        world, hashes = self.world, dict[str, str]()

        def hash_own() -> dict[str, str]:
            files = [*aside.glob(f"shard-{world.rank + 1:05d}-*.safetensors")]
            for file in files:
                sync(file)
            return checkpoint.hashes_of(files)

        def publish() -> None:
            if world.first:
                checkpoint.mark(aside, step, state, hashes)
            self.made.close()

        try:
            # After an error nothing is left of it.
            with self.made:
                written.result()
                own = json.dumps(world.everywhere(hash_own, self.group))
                for rank in range(world.size):
                    hashes |= json.loads(broadcast(own, rank, self.group))
                world.everywhere(publish, self.group)
        except CheckpointException as error:
            self.failure = next(iter(error.failures.values()))[0]
        except Exception as error:
            self.failure = error

    def newest(self) -> checkpoint.Checkpoint | None:
        steps = self.world.from_first(self.steps)
        quiet = not self.world.first
        return checkpoint.newest_checkpoint(self.folder, self.read, steps, quiet=quiet)

    def read(self, folder: Path, *, optimizer: bool = True) -> checkpoint.Checkpoint:
        """As one process does; the processes share the hashing out."""
        share = slice(self.world.rank, None, self.world.size)
        own = partial(checkpoint.read_checkpoint, folder, optimizer=optimizer, share=share)
        return self.world.everywhere(own)

    def fill(self, folder: Path, wanted: checkpoint.Tensors) -> None:
        read_shards(folder, wanted, self.stepped)


def read_shards(folder: Path, tensors: checkpoint.Tensors, stepped: Collection[str] = ()) -> None:
    """Fill tensors in place from what any number of processes, or one alone, have written.

    A `CheckpointError` names a tensor that is missing, or of another shape than the model's.
    """
    read = as_written(tensors, stepped)
    try:
        with warnings.catch_warnings():
            # That one process alone reads is meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            reader = HuggingFaceStorageReader(str(folder))
            load(read, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{folder}: not a checkpoint of this model: {reason}") from None
    for name, tensor in tensors.items():
        if name.rpartition("/")[2] in stepped:
            value = read[name].view(tensor.shape)
            if isinstance(tensor, DTensor):
                mesh, placements = tensor.device_mesh, tensor.placements
                value = distribute_tensor(value, mesh, placements, src_data_rank=None)
            with torch.no_grad():
                tensor.copy_(value)


def as_written(tensors: checkpoint.Tensors, stepped: Collection[str]) -> checkpoint.Tensors:
    """The tensors, moments among them, in the shapes that they have in one process."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name.rpartition("/")[2] in stepped:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[name] = whole.flatten(0, 1)
    return found


def write_model(model: CausalLM, folder: Path, world: World, stepped: Collection[str]) -> None:
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
