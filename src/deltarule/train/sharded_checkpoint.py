"""Checkpoints of a run on several processes: the same folders, a file for each process's part.

Writing goes on beside the next steps. As on one process, a `step-N` is whole or not there: parts
are written aside, synced and hashed by those who wrote them, and one rename makes them visible.
"""

import json
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from deltarule.atomic_file import sync
from deltarule.models.files import CheckpointError
from deltarule.parallel import World
from deltarule.parallel.shard_files import (
    as_written,
    own_files,
    read_shards,
    take_written,
    write_shards,
)
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


class ShardedCheckpoints:
    """`Checkpoints` of a run whose tensors lie on several processes.

    Args:
        folder: As of `Checkpoints`; all processes see it.
        keep: How many of the newest to keep.
        world: The processes. Any number of them reads what any other has written.
        stepped: Names of parameters split with an axis of steps.

    Raises:
        ValueError: `keep` is below 1.
    """

    def __init__(
        self, folder: Path, *, keep: int, world: World, stepped: Collection[str] = ()
    ) -> None:
        self.folder, self.keep, self.world, self.stepped = folder, keep, world, stepped
        self.plain: Checkpoints | None = None

        def make() -> None:
            self.plain = Checkpoints(folder, keep=keep)

        world.from_first(make)
        # Of its own: collectives of two threads must not meet.
        self.group = dist.new_group(backend="gloo", timeout=world.timeout)
        self.writing: threading.Thread | None = None
        self.failure: BaseException | None = None

    def steps(self) -> list[int]:
        """Steps that are whole, on the first process."""
        return [] if self.plain is None else self.plain.steps()

    def spare(self, step: int) -> None:
        """Keep a step whatever comes after it; the first process removes the others."""
        if self.plain is not None:
            self.plain.spare(step)

    def save(self, step: int, tensors: Tensors, state: dict[str, Any]) -> None:
        """Begin to write one checkpoint, once the one before is there."""
        self.wait()
        aside = self.folder / f".step-{step}.tmp"

        def prepare() -> None:
            assert self.plain is not None
            self.plain.remove(aside)
            aside.mkdir()

        self.world.from_first(prepare)
        written = write_shards(aside, as_written(tensors, self.stepped), self.group)
        arguments = written, aside, step, json.dumps(state)
        self.writing = threading.Thread(target=self._finish, args=arguments)
        self.writing.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk.

        Raises:
            OSError: Some process could not write its part; older checkpoints stay.
        """
        if self.writing is not None:
            self.writing.join()
            self.writing = None
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise OSError(f"{self.folder}: the checkpoint was not written: {failure}")

    def _finish(self, written: Future[Any], aside: Path, step: int, state: str) -> None:
        try:
            written.result()
            self._all(lambda: self._hash_own(aside))
            self._all(lambda: self._publish(aside, step, state) if self.world.first else None)
        except CheckpointException as error:
            self.failure = next(iter(error.failures.values()))[0]
        except Exception as error:
            self.failure = error

    def _all(self, do: Callable[[], None]) -> None:
        """Do something everywhere; where one process fails, all do."""
        failure: Exception | None = None
        try:
            do()
        except OSError as error:
            failure = error
        failed = torch.tensor(int(failure is not None))
        dist.all_reduce(failed, group=self.group)
        if failure is not None:
            raise failure
        if failed:
            raise OSError("another process could not write its part")

    def _hash_own(self, aside: Path) -> None:
        files = own_files(aside, self.world.rank)
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
        assert self.plain is not None
        self.plain.publish(aside, step, state, hashes)

    def newest(self) -> Checkpoint | None:
        """The newest folder whose files still have their hashes, which the processes share out.

        Raises:
            CheckpointError: There are checkpoints, and every one of them is damaged.
        """
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
            bad = [name for name in names if file_hash(folder / name) != hashes[name]]
        except (CheckpointError, OSError) as error:
            bad = [str(error)]
        return int(self.world.sum(torch.tensor(len(bad)))) == 0

    def weights_of(self, step: int) -> Checkpoint:
        return Checkpoint(step, {}, {})

    def fill(self, checkpoint: Checkpoint, wanted: Tensors) -> None:
        """Fill what this process holds of tensors."""
        read = as_written(wanted, self.stepped)
        read_shards(self.folder / f"step-{checkpoint.step}", read)
        take_written(wanted, read, self.stepped)
