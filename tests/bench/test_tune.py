"""What tune tries, what it keeps, and that a candidate reaches the kernels."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from deltarule.bench import tune as module
from deltarule.bench.tune import TuneRun, candidates, fastest, kernels_of, milliseconds, tune
from deltarule.doctor.examine import Configuration, draw
from deltarule.kernels import machine
from deltarule.kernels.triton import configurations

TINY = Configuration("tied", "head", 1, "float32", 16, 16)
SHIPPED = {"BV": 32, "num_warps": 4, "STAGES": 2, "BT": 64}


@pytest.fixture
def inputs():
    return draw(TINY, (20,), torch.device("cpu"), False)._replace(cu_seqlens=None)


def test_the_shipped_configuration_comes_first_and_once() -> None:
    found = candidates("next_state", SHIPPED)
    assert found[0] == SHIPPED
    assert all(found.count(x) == 1 for x in found)
    # The rows of a chunk are one choice for all kernels of a call.
    assert {x["BT"] for x in found} == {64}
    assert {x["BV"] for x in found} == {16, 32, 64, 128}


@pytest.mark.parametrize(("best", "kept"), [(0.5, True), (0.99, False)])
def test_only_a_worthwhile_candidate_is_kept(best, kept, monkeypatch, inputs) -> None:
    winner = {**SHIPPED, "num_warps": 8}
    monkeypatch.setattr(
        module, "milliseconds", lambda kernel, config, inputs: best if config == winner else 1.0
    )
    assert fastest("next_state", SHIPPED, inputs) == (winner if kept else None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter only")
def test_a_candidate_reaches_the_kernels(inputs) -> None:
    config = {"BV": 16, "BC": 16, "num_warps": 4, "num_stages": 1}
    assert milliseconds("gradients", config, inputs) < 1e6
    # No kernel takes it, so that it must have been given.
    assert milliseconds("gradients", config | {"BV": 12}, inputs) == float("inf")


def test_every_kernel_of_a_call_has_a_shipped_row(inputs) -> None:
    call = configurations.call_of(inputs)
    assert list(kernels_of(call)) == [
        "pair_scores",
        "next_state",
        "next_state_backward",
        "gradients",
    ]
    free = call._replace(erase="free", copies=True)
    assert "next_state_free" in list(kernels_of(free))
    assert all(configurations.shipped(kernel, free) for kernel in kernels_of(free))


def test_what_is_right_is_kept_at_once_and_what_is_wrong_is_not(
    tmp_path, monkeypatch, inputs, capsys
) -> None:
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "identity", lambda: {"gpu": "one"})
    monkeypatch.setattr(module, "timed_inputs", lambda of, tokens, heads: inputs)
    tried, best = [], {"BV": 16, "num_warps": 8, "STAGES": 1}

    def found(kernel, shipped, inputs):
        tried.append(kernel)
        return best if kernel.startswith("next_state") else None

    monkeypatch.setattr(module, "fastest", found)
    monkeypatch.setattr(
        module, "wrong", lambda of, best: "far off" if "next_state_backward" in best else None
    )
    run = TuneRun(head_k_dim=16, head_v_dim=16, dtype="float32")
    with pytest.raises(ValueError, match=r"next_state_backward is fastest with .* far off"):
        tune(run)
    assert tried == ["pair_scores", "next_state", "next_state_backward"]
    assert machine.kept("tables") == {"next_state": {"4 bytes, K to 16": best}}
    assert "pair_scores: the package's own configuration stays" in capsys.readouterr().out
    tried.clear()
    tune(replace(run, kernel="gradients"))
    assert tried == ["gradients"]
    with pytest.raises(ValueError, match=r"--kernel must be one of pair_scores, .*got matmul"):
        tune(replace(run, kernel="matmul"))


def test_show_without_a_table(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path)
    tune(TuneRun(show=True))
    assert "the package's own is used" in capsys.readouterr().out
    machine.keep("tables", {"gradients": {"2 bytes, K to 128": {"BV": 16}}})
    tune(TuneRun(show=True))
    assert "2 bytes, K to 128" in capsys.readouterr().out
