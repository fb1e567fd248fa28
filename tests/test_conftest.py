import os
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gpus
from left_patched import unpatched

seen: list[float] = []


def test_fresh_memory_is_nan_and_integers_are_out_of_any_range():
    x = torch.zeros(3, 4)
    for fresh in (
        torch.empty(3, 4), torch.empty((3, 4), dtype=torch.bfloat16), torch.empty_like(x),
        torch.empty_strided((3, 4), (4, 1)), x.new_empty(3, 4),
        x.new_empty((3, 4), requires_grad=True), x.new_empty(size=(3, 4), dtype=torch.float64),
    ):  # fmt: skip
        assert fresh.isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).min).all()


def test_poison_reaches_compiled_code():
    def unwritten(x):
        return x.new_empty(3) + torch.empty(3) + torch.empty_like(x)

    compiled = torch.compile(unwritten, fullgraph=True, backend="aot_eager")
    assert compiled(torch.zeros(3)).isnan().all()


@pytest.mark.parametrize("attempt", [1, 2])
def test_every_test_starts_from_the_same_seed(attempt):
    drawn = torch.rand(()).item() + np.random.rand()  # noqa: NPY002
    seen.append(drawn)
    assert seen[0] == drawn


drawn_by_example: set[float] = set()


@given(st.integers(0, 1000))
def test_examples_do_not_depend_on_each_other(example):
    drawn_by_example.add(torch.rand(()).item())
    assert len(drawn_by_example) == 1


def test_a_patch_that_is_left_is_named_and_taken_back(monkeypatch):
    patches, patched = ModuleType("patches"), ModuleType("patched")
    patched.recurrence = "ours"
    patches._HELD = {(patched, "recurrence"): ("theirs", 1)}
    monkeypatch.setitem(sys.modules, "deltarule.hf.patch", patches)
    assert unpatched() == ["patched.recurrence"]
    assert patched.recurrence == "theirs"
    assert unpatched() == []


@pytest.mark.parametrize(
    ("devices", "worker", "expected"),
    [
        ("0,1,2", "gw0", "0,1,2"), ("0,1,2", "gw4", "1,2,0"), ("GPU-a,GPU-b", "gw1", "GPU-b,GPU-a"),
        ("3", "gw7", "3"), ("1,0", None, "1,0"), (None, "gw3", ""),
    ],
)  # fmt: skip
def test_each_process_of_several_begins_with_another_gpu(devices, worker, expected, monkeypatch):
    """One process takes what it is given, and without a GPU there is none to take."""
    for name, value in (("CUDA_VISIBLE_DEVICES", devices), ("PYTEST_XDIST_WORKER", worker)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(gpus.Path, "glob", lambda self, pattern: [])
    gpus.spread()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
