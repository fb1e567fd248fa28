"""The doctor's processes: what one of them suffers is a finding, but for a lack of memory."""

import os

import pytest
import torch

from promised import promised

promised("triton")

from deltarule.doctor import command
from deltarule.doctor.command import examined_apart, fitting_processes
from deltarule.doctor.examine import Configuration, Verdict, examined

GOOD = [Configuration("tied", "head", 1, "float32", 16, size) for size in (16, 32)]
BAD = Configuration("free", "head", 1, "float32", 16, 16)


def dies_of_a_free_erase(of: Configuration) -> Verdict:
    """Stands in for the examination."""
    if of.erase == "free":
        os._exit(7)
    return Verdict(str(of), True, None, 1.0, 0.0)


def has_no_memory(of: Configuration) -> None:
    """Stands in for the examination."""


def test_a_process_that_dies_is_a_finding(monkeypatch) -> None:
    monkeypatch.setattr(command, "examine_alone", dies_of_a_free_erase)
    found = list(examined_apart([BAD, *GOOD], 1))
    assert [verdict.passed for verdict in found] == [False, True, True]
    assert found[0].error == "the process ended with code 7"
    assert found[0].name.startswith("erase free")


def test_too_little_memory_is_an_error_and_no_finding(monkeypatch) -> None:
    monkeypatch.setattr(command, "examine_alone", has_no_memory)
    with pytest.raises(ValueError, match=r"too little free memory.*--processes"):
        list(examined_apart([BAD], 1))


def test_no_memory_in_the_examination_is_told(monkeypatch) -> None:
    def examine(*_: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(command, "examine", examine)
    assert command.examine_alone(BAD) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter only")
def test_the_examination_itself_answers() -> None:
    (verdict,) = examined_apart([Configuration("none", "none", 1, "float32", 16, 16)], 1)
    assert verdict.passed, verdict


def test_a_broken_context_ends_the_examination_in_one_process(monkeypatch) -> None:
    from deltarule.doctor import examine

    failed = Verdict("name", False, "illegal access", 1.0, 0.0)
    monkeypatch.setattr(examine, "examine", lambda of, device: failed)
    monkeypatch.setattr(examine, "gpu_is_lost", lambda: True)
    found = examined(GOOD, torch.device("cpu"))
    assert next(found) == failed
    with pytest.raises(ValueError, match="without --processes 0"):
        next(found)


@pytest.mark.parametrize(("free", "processes"), [(2**30, 1), (7 * 2**30, 2), (2**40, 16)])
def test_processes_fit_the_memory(monkeypatch, free, processes) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**40))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(64), raising=False)
    assert fitting_processes() == processes
