"""Processes that each do one task at a time: what one of them suffers is its task's alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltarule import processes
from deltarule.processes import Done, each_apart, gpu_is_lost


def do(task: str) -> tuple[str, int, str | None]:
    """What a task says."""
    print("a compiler's own output")
    if task == "die":
        print("an illegal access", file=sys.stderr)
        os._exit(7)
    if task == "raise":
        raise ValueError("no such kernel")
    if task == "hang":
        time.sleep(600)
    if task == "lose the GPU":
        processes.gpu_is_lost = lambda: True
    if task == "stop me":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    return task, os.getpid(), os.environ.get("SEEN")


def done(*tasks: str, **options: object) -> list[Done]:
    return list(each_apart(do, tasks, **options))


def test_one_process_does_task_after_task_and_sees_its_variables() -> None:
    first, second = done("one", "two", environment={"SEEN": "yes"})
    assert [x.task for x in (first, second)] == ["one", "two"]
    assert first.value == ("one", second.value[1], "yes")
    assert "SEEN" not in os.environ


FAULTS = {
    "die": "the process ended with code 7: an illegal access",
    "raise": "the process ended with code 1: ValueError: no such kernel",
    "hang": "took more than 5 s",
}


def test_what_follows_a_fault_is_done_in_another_process() -> None:
    found = done("one", *FAULTS, "two", limit_s=5.0)
    assert {x.task: x.error for x in found if x.error is not None} == FAULTS
    assert [x.value[0] for x in found if x.error is None] == ["one", "two"]


def test_a_process_that_lost_its_gpu_leaves_after_its_answer() -> None:
    first, second = done("lose the GPU", "two")
    assert first.error is second.error is None
    assert first.value[1] != second.value[1]
    assert not gpu_is_lost()


def test_tasks_apart_from_each_other_and_side_by_side(tmp_path: Path) -> None:
    began = []

    def tasks():
        for task in ("one", "two", "three"):
            began.append(task)
            yield task

    found = each_apart(
        do, tasks(), processes=2, afresh=True, log_of=lambda task: tmp_path / f"{task}.txt"
    )
    first = next(found)
    # The third waits for a process.
    assert began == ["one", "two"]
    assert len({x.value[1] for x in [first, *found]}) == 3
    assert (tmp_path / "three.txt").read_text() == "a compiler's own output\n"


def test_who_stops_early_waits_for_nothing() -> None:
    began = time.monotonic()
    found = each_apart(do, ["one", "hang", "hang"])
    assert next(found).task == "one"
    found.close()
    assert time.monotonic() - began < 60


def test_what_looks_on_may_end_it_all() -> None:
    def look(at_work: list[processes.Worker]) -> None:
        if at_work and at_work[0].last_line():
            raise InterruptedError(at_work[0].last_line())

    with pytest.raises(InterruptedError, match="a compiler's own output"):
        done("hang", look=look)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes by way of /proc")
def test_a_killed_parent_leaves_no_process() -> None:
    script = "import test_processes as t; t.done('stop me')"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": paths, "KILLED_PARENT": "yes"},
    )
    assert parent.wait(timeout=60) == -signal.SIGKILL
    until = time.monotonic() + 20
    while any(is_serving(path) for path in Path("/proc").glob("[0-9]*/cmdline")):
        assert time.monotonic() < until
        time.sleep(0.1)


def is_serving(path: Path) -> bool:
    """Whether a process is one of ours that waits in vain."""
    try:
        own = f"/proc/{path.parent.name}/environ"
        return b"spawn_main" in path.read_bytes() and b"KILLED_PARENT" in Path(own).read_bytes()
    except OSError:
        return False
