import time

import pytest
import torch

from bench import timing

on_the_host = pytest.mark.skipif(torch.cuda.is_available(), reason="reads the GPU's clock there")


@on_the_host
def test_eager_time_is_that_of_a_call():
    calls = []

    def run():
        calls.append(None)
        time.sleep(0.002)

    assert timing.eager_ms([run], 5) == pytest.approx(2, rel=0.9)
    # Three to warm up.
    assert len(calls) == 8


@on_the_host
def test_runs_take_turns():
    calls = []
    runs = [lambda name=name: calls.append(name) for name in "abc"]
    timing.event_times(runs, 4)
    assert calls == ["a", "b", "c", "a"]
    calls.clear()
    timing.event_times(runs, 2)
    assert calls == ["a", "b", "c"]


def test_host_time_counts_calls_that_do_not_wait():
    assert timing.host_us(lambda: time.sleep(0.001), 2) == pytest.approx(1000, rel=0.9)


@on_the_host
def test_there_is_no_device_memory_to_count():
    assert timing.extra_mib(lambda: torch.zeros(10)) is None


@pytest.mark.gpu
def test_a_graph_and_events_agree_on_a_large_product():
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    graph = timing.graph_ms([lambda: x @ x], 5)
    assert graph == pytest.approx(timing.eager_ms([lambda: x @ x], 20), rel=0.3)


@pytest.mark.gpu
def test_extra_memory_is_the_peak_beyond_the_start():
    kept = torch.zeros(2**20, device="cuda")

    def run():
        first = torch.zeros(2**20, device="cuda")
        return first + kept

    assert timing.extra_mib(run) == pytest.approx(8, abs=0.1)
