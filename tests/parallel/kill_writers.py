"""A process that, with another, writes one checkpoint after the other until it is killed."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from deltarule.parallel import World
from deltarule.train.sharded_checkpoint import ShardedCheckpoints

ROWS = 1000


def write(folder: Path, group: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.FileStore(group, size), rank=rank, world_size=size)
    world = World(torch.device("cpu"))
    assert world.mesh is not None
    mesh = world.mesh["shard"]
    weight = distribute_tensor(torch.zeros(ROWS, 50), mesh, [Shard(0)], src_data_rank=None)
    checkpoints = ShardedCheckpoints(folder, keep=2, world=world)
    for step in range(1, 10**6):
        weight.to_local().fill_(step)
        checkpoints.save(step, {"weight": weight}, {"step": step})
        # It may change at once: what is written is what it was.
        weight.to_local().fill_(-1)
        print(step, flush=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
