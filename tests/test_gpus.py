"""Each process of pytest-xdist begins with another GPU."""

import os

import pytest

import gpus


@pytest.mark.parametrize(
    ("devices", "worker", "expected"),
    [
        ("0,1,2", "gw0", "0,1,2"),
        ("0,1,2", "gw4", "1,2,0"),
        ("GPU-a,GPU-b", "gw1", "GPU-b,GPU-a"),
        ("3", "gw7", "3"),
    ],
)
def test_each_process_begins_with_another(devices, worker, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    gpus.spread()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_one_process_takes_what_it_is_given(monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    gpus.spread()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"


def test_without_a_gpu_there_is_none_to_take(monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus.Path, "glob", lambda self, pattern: [])
    gpus.spread()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
