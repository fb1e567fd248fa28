from types import SimpleNamespace

import pytest
import torch

from bench import timing

on_the_host = pytest.mark.skipif(torch.cuda.is_available(), reason="reads the GPU's clock there")


@pytest.fixture
def clock(monkeypatch):
    """A clock that each call of `run` moves by the next of `work` seconds, on any machine."""
    clock = SimpleNamespace(now=0.0, calls=0, work=())

    def run():
        clock.now += clock.work[clock.calls % len(clock.work)]
        clock.calls += 1

    clock.run = run
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


@on_the_host
def test_eager_time_is_the_median_of_calls_after_three_to_warm_up(clock):
    clock.work = 9.0, 9.0, 9.0, 0.002, 0.002, 0.002, 0.001, 0.005
    assert timing.eager_ms([clock.run], 5) == pytest.approx(2)
    assert clock.calls == 8


@on_the_host
def test_runs_take_turns():
    calls = []
    runs = [lambda name=name: calls.append(name) for name in "abc"]
    timing.event_times(runs, 4)
    assert calls == ["a", "b", "c", "a"]
    calls.clear()
    timing.event_times(runs, 2)
    assert calls == ["a", "b", "c"]


def test_host_time_is_that_of_one_call_after_a_round_to_warm_up(clock):
    rounds = 1.0, 0.001, 0.002, 0.006
    clock.work = [seconds for seconds in rounds for _ in range(timing.QUEUED_CALLS)]
    assert timing.host_us(clock.run, 3) == pytest.approx(2000)


def test_runs_to_compare_take_turns_after_one_that_is_not_counted():
    calls = []
    runs = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = timing.interleaved_seconds(runs, repeats=3)
    assert calls == ["a", "b"] * 4
    assert [len(seconds[name]) for name in "ab"] == [3, 3]


def test_gradients_belong_to_their_inputs():
    inputs = {"x": torch.tensor(3.0), "y": torch.tensor(5.0)}
    found = timing.outputs(lambda x: x["x"] * x["y"], inputs, torch.tensor(2.0))
    assert found == {"o": 15.0, "grad x": 10.0, "grad y": 6.0}


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
