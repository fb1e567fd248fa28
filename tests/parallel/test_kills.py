"""Processes killed at any moment: the newest checkpoint is whole, and a run goes on from it."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from deltarule.parallel import World
from deltarule.train.checkpoint import Checkpoints
from deltarule.train.metrics import read_metrics
from deltarule.train.sharded_checkpoint import ShardedCheckpoints, read_shards

ROWS = 1000


def start_writer(rank: int, folder: Path, group: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    with errors_of(group).open("a") as errors:
        return subprocess.Popen(
            [sys.executable, __file__, str(folder), str(group)],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip


def errors_of(group: Path) -> Path:
    """What both writers of a group said before they failed."""
    return group.with_suffix(".errors")


def kill_and_read(folder: Path, group: Path, chance: random.Random) -> int:
    """The step of the newest checkpoint after one or both of two writers were killed."""
    writers = [start_writer(rank, folder, group) for rank in range(2)]
    try:
        for writer in writers:
            # The second save has begun, so that the first is there.
            while writer.stdout.readline().strip() != "2":
                assert writer.poll() is None, errors_of(group).read_text()
        time.sleep(chance.uniform(0, 0.5))
        for writer in chance.choice([writers, writers[:1], writers[1:]]):
            writer.kill()
        # The other one may go on for a moment; nothing it writes may count.
        time.sleep(chance.uniform(0, 0.2))
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            writer.stdout.close()
    newest = Checkpoints(folder).newest()
    assert newest is not None
    weight = torch.zeros(ROWS, 50)
    read_shards(folder / f"step-{newest.step}", {"weight": weight})
    assert torch.equal(weight, torch.full_like(weight, newest.step))
    assert newest.state == {"step": newest.step}
    assert not list(folder.glob(".*"))
    return newest.step


@pytest.mark.parametrize("times", [5, pytest.param(50, marks=pytest.mark.distributed)])
def test_kills(tmp_path: Path, times: int) -> None:
    chance = random.Random(0)
    for attempt in range(times):
        folder = tmp_path / str(attempt)
        assert kill_and_read(folder, tmp_path / f"group-{attempt}", chance) >= 1


WORDS = (
    "train text --name run --steps {steps} --accumulate 2 --batch-tokens 256 --length 32 "
    "--save-every 4 --evaluate-every 0 --sample-bytes 0 --validation-bytes 500 --long-length 64 "
    "--num-layers 1 --hidden-size 16 --head-k-dim 8 --head-v-dim 8 --device cpu"
)


def launch(
    folder: Path,
    steps: int,
    *options: str,
    restarts: int = 2,
    late: int | None = None,
    stall: str = "exec sleep 600",
) -> subprocess.Popen[str]:
    """`torchrun` on two processes, of which one may be `late`, by default for good."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        corpus.write_text("a state is decayed, erased under a key, and written to; " * 400)
    words = WORDS.format(steps=steps).split()
    hang = f'[ "$RANK" = {late} ] && {stall}; exec "$@"'
    script = ["--no-python", "bash", "-c", hang, "-", sys.executable, "-m", "deltarule"]
    return subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "--max-restarts", str(restarts), "--monitor-interval", "0.2", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "localhost:0", *script, *words,
            "--data", str(corpus), "--runs", str(folder), *options,
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def workers_of(launcher: subprocess.Popen[str]) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(launcher.pid)], capture_output=True, text=True
    )  # fmt: skip
    return sorted(int(pid) for pid in found.stdout.split())


def wait_for(path: Path, seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.05)


def losses(run: Path) -> dict[int, float]:
    return {
        row["step"]: row["loss"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row
    }


@pytest.mark.distributed
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_is_started_again(tmp_path: Path, rank: int) -> None:
    """The run ends as if nothing had been, bit for bit."""
    (tmp_path / "whole").mkdir()
    whole = launch(tmp_path / "whole", 60)
    whole.communicate(timeout=200)
    assert whole.returncode == 0
    (tmp_path / "killed").mkdir()
    launcher = launch(tmp_path / "killed", 60)
    wait_for(tmp_path / "killed/run/checkpoints/step-8")
    os.kill(workers_of(launcher)[rank], signal.SIGKILL)
    out, _ = launcher.communicate(timeout=200)
    assert launcher.returncode == 0
    assert out.count("done in") == 1
    assert losses(tmp_path / "killed/run") == losses(tmp_path / "whole/run")


def said(folder: Path, *options: str, **late: Any) -> list[str]:
    """What deltarule says before it fails on two processes: no more than a line is meant."""
    launcher = launch(folder, 8, *options, restarts=0, **late)
    _, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == 1
    words = "deltarule: ", "Error pars", "options: "
    return [line for line in errors.splitlines() if any(word in line for word in words)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("--resume", "--resume"),
        ("--tensr 2", "--tensr"),
        ("--context 3", "must divide the 2 processes that torchrun started"),
        ("--tensor 2 --num-heads 3", "num_heads=3 cannot be split over 2 processes"),
    ],
)
def test_the_first_process_says_what_is_wrong_however_late(
    tmp_path: Path, wrong: str, words: str
) -> None:
    (line,) = said(tmp_path, *wrong.split(), late=0, stall="sleep 2")
    assert words in line
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


@pytest.mark.distributed
@pytest.mark.parametrize("late", [0, 1])
def test_a_process_that_never_starts_is_named(tmp_path: Path, late: int) -> None:
    (line,) = said(tmp_path, "--timeout-s", "4", late=late)
    assert f"process {late} has not started within 4 s; --timeout-s sets how long" in line


@pytest.mark.distributed
def test_a_launcher_that_is_told_to_end_saves_first(tmp_path: Path) -> None:
    launcher = launch(tmp_path, 4000)
    wait_for(tmp_path / "run/checkpoints/step-4")
    launcher.terminate()
    _, errors = launcher.communicate(timeout=120)
    assert errors.count("deltarule: stopped after step") == 1
    assert "  torchrun --nproc-per-node 2 -m deltarule train text --resume --name run" in errors
    newest = Checkpoints(tmp_path / "run/checkpoints").newest()
    assert newest is not None
    assert f"stopped after step {newest.step}," in errors


@pytest.mark.distributed
def test_a_process_that_hangs_ends_all_and_is_named(tmp_path: Path) -> None:
    launcher = launch(tmp_path, 4000, "--timeout-s", "8")
    wait_for(tmp_path / "run/checkpoints/step-4")
    hanging = workers_of(launcher)[1]
    os.kill(hanging, signal.SIGSTOP)
    try:
        # It is started again, and goes on.
        step = max(losses(tmp_path / "run"))
        until = time.monotonic() + 150
        while max(losses(tmp_path / "run")) < step + 20:
            assert time.monotonic() < until
            time.sleep(0.5)
    finally:
        launcher.terminate()
        _, errors = launcher.communicate(timeout=120)
    assert "no word from process 1 (in step" in errors


def write(folder: Path, group: str) -> None:
    """Write one checkpoint after the other, with another process, until killed."""
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
