"""Checkpoints of a run on several processes: the same folders, a file for each process's part.

Writing goes on beside the next steps. As on one process, a `step-N` is whole or not there: parts
are written aside, synced and hashed by those who wrote them, and one rename makes them visible.
"""

import json
import shutil
import threading
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from deltarule.atomic_file import sync
from deltarule.models.files import CheckpointError
from deltarule.parallel import World, shard_files
from deltarule.train.checkpoint import (
    STATE,
    Checkpoint,
    Checkpoints,
    Tensors,
    file_hash,
    read_json,
    read_marker,
)

HASHES = ".hashes-{}.json"


class ShardedCheckpoints(Checkpoints):
    """`Checkpoints` of a run whose tensors lie on several processes, which all see the folder.

    Any number of processes reads what any other has written. Parameters named `stepped` are split
    with an axis of steps.
    """

    def __init__(
        self, folder: Path, *, keep: int, world: World, stepped: Collection[str] = ()
    ) -> None:
        # The first process makes the folder and removes what was left in it; the others find that.
        world.from_first(lambda: Checkpoints(folder, keep=keep).steps())
        super().__init__(folder, keep=keep)
        self.world, self.stepped = world, stepped
        # Of its own: collectives of two threads must not meet.
        self.group = dist.new_group(backend="gloo", timeout=world.timeout)
        self.writing: threading.Thread | None = None
        self.failure: BaseException | None = None

    def save(self, step: int, tensors: Tensors, state: dict[str, Any]) -> Path:
        """Begin to write one checkpoint, once the one before is there."""
        self.wait()
        aside = self.folder / f".step-{step}.tmp"

        def prepare() -> None:
            self.remove(aside)
            aside.mkdir()

        self.world.from_first(prepare)
        written = shard_files.write_shards(
            aside, shard_files.as_written(tensors, self.stepped), self.group
        )
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
        first = self.world.first
        try:
            written.result()
            self.world.everywhere(lambda: self._hash_own(aside), self.group)
            self.world.everywhere(
                lambda: self._publish(aside, step, state) if first else None, self.group
            )
        except CheckpointException as error:
            self.failure = next(iter(error.failures.values()))[0]
        except Exception as error:
            self.failure = error
        if first:
            # Where the disk is full, half a checkpoint must not keep it so.
            shutil.rmtree(aside, ignore_errors=True)

    def _hash_own(self, aside: Path) -> None:
        files = shard_files.own_files(aside, self.world.rank)
        for file in files:
            sync(file)
        hashes = {file.name: file_hash(file) for file in files}
        (aside / HASHES.format(self.world.rank)).write_text(json.dumps(hashes))

    def _publish(self, aside: Path, step: int, state: str) -> None:
        hashes: dict[str, str] = {}
        for rank in range(self.world.size):
            part = aside / HASHES.format(rank)
            hashes |= read_json(part)
            part.unlink()
        self.publish(aside, step, state, hashes)

    def newest(self) -> Checkpoint | None:
        """The newest folder whose files still have their hashes, which the processes share out."""
        steps = self.world.from_first(self.steps)
        for step in reversed(steps):
            folder = self.folder / f"step-{step}"
            if self._is_whole(folder):
                return Checkpoint(step, read_json(folder / STATE), {})
            if self.world.first:
                print(f"note: skipped a damaged checkpoint: {folder}")
        if steps:
            raise CheckpointError(f"{self.folder}: every checkpoint is damaged")
        return None

    def _is_whole(self, folder: Path) -> bool:
        try:
            hashes = read_marker(folder)[1]
            names = sorted(hashes)[self.world.rank :: self.world.size]
            bad = any(file_hash(folder / name) != hashes[name] for name in names)
        except (CheckpointError, OSError):
            bad = True
        return not self.world.sum(torch.tensor(int(bad)))

    def weights_of(self, step: int) -> Checkpoint:
        """The checkpoint of a step; its files were found whole, or written by this run."""
        return Checkpoint(step, {}, {})

    def fill(self, checkpoint: Checkpoint, wanted: Tensors) -> None:
        read = shard_files.as_written(wanted, self.stepped)
        shard_files.read_shards(self.folder / f"step-{checkpoint.step}", read)
        shard_files.take_written(wanted, read, self.stepped)
