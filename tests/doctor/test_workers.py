"""Processes of the doctor: what one of them suffers is no finding about the others' kernels."""

import sys
import time

import pytest
import torch

from promised import promised

promised("triton")

from deltarule.doctor import workers
from deltarule.doctor.command import fitting_processes
from deltarule.doctor.examine import Configuration, examined, usable
from deltarule.doctor.workers import examined_apart

GOOD = [Configuration("tied", "head", 1, "float32", 16, size) for size in (16, 32, 64, 128)]
BAD = Configuration("free", "head", 1, "float32", 16, 16)
# Stands in for the examination: passes every configuration but those with a free erase.
SCRIPT = """
import json, os, sys, time
from deltarule.doctor import workers
from deltarule.doctor.examine import Verdict
seen = []
def examine(of, device):
    print("a compiler's own output")
    if seen and seen[-1].erase == "free":
        return Verdict(str(of), False, "the context is broken", 1.0, 0.0)
    seen.append(of)
    if of.erase == "free":
        {fault}
    return Verdict(str(of), of.erase != "free", "wrong", 1.0, 0.0)
workers.examine = examine
workers.usable = lambda device: {usable}
workers.main()
"""


def verdicts(monkeypatch, fault: str, configurations, usable: bool = True, processes: int = 2):
    script = SCRIPT.format(fault=fault, usable=usable)
    monkeypatch.setattr(workers, "PROGRAM", [sys.executable, "-W", "ignore", "-c", script])
    return list(examined_apart(configurations, processes))


def test_output_of_a_compiler_is_no_answer(monkeypatch) -> None:
    found = verdicts(monkeypatch, "pass", GOOD[:2])
    assert [verdict.passed for verdict in found] == [True, True]


@pytest.mark.parametrize("fault", ["os._exit(7)", "pass"], ids=["dies", "breaks the context"])
def test_what_follows_a_fault_is_examined_in_another_process(monkeypatch, fault) -> None:
    found = verdicts(monkeypatch, fault, [BAD, *GOOD[:2]], usable=False, processes=1)
    assert [verdict.passed for verdict in found] == [False, True, True]
    expected = "its process ended with code 7" if "exit" in fault else "wrong"
    assert found[0].error == expected


def test_a_kernel_that_never_ends_is_a_finding(monkeypatch) -> None:
    monkeypatch.setattr(workers, "LIMIT_SECONDS", 1.0)
    (verdict,) = verdicts(monkeypatch, "time.sleep(600)", [BAD], processes=1)
    assert not verdict.passed
    assert "ended with code -9" in verdict.error


def test_too_little_memory_is_an_error_and_no_finding(monkeypatch) -> None:
    fault = "import torch; raise torch.OutOfMemoryError('none left')"
    with pytest.raises(ValueError, match=r"too little free memory.*--processes"):
        verdicts(monkeypatch, fault, [BAD, *GOOD], processes=1)


def test_who_stops_early_waits_for_no_more_than_what_runs(monkeypatch) -> None:
    script = SCRIPT.format(fault="time.sleep(600)", usable=True)
    monkeypatch.setattr(workers, "PROGRAM", [sys.executable, "-W", "ignore", "-c", script])
    start, found = time.perf_counter(), examined_apart([GOOD[0], BAD, BAD, BAD], 1)
    assert next(found).passed
    found.close()
    assert time.perf_counter() - start < 100


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter only")
def test_the_program_itself_answers() -> None:
    (verdict,) = examined_apart([Configuration("none", "none", 1, "float32", 16, 16)], 1)
    assert verdict.passed, verdict


def test_a_broken_context_ends_the_examination_in_one_process(monkeypatch) -> None:
    from deltarule.doctor import examine

    failed = examine.Verdict("name", False, "illegal access", 1.0, 0.0)
    monkeypatch.setattr(examine, "examine", lambda of, device: failed)
    monkeypatch.setattr(examine, "usable", lambda device: False)
    found = examined(GOOD, torch.device("cpu"))
    assert next(found) == failed
    with pytest.raises(ValueError, match="without --processes 0"):
        next(found)


def test_a_cpu_is_always_usable() -> None:
    assert usable(torch.device("cpu"))


@pytest.mark.parametrize(("free", "processes"), [(2**30, 1), (7 * 2**30, 2), (2**40, 16)])
def test_processes_fit_the_memory(monkeypatch, free, processes) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**40))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(64), raising=False)
    assert fitting_processes() == processes
