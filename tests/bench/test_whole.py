"""The benchmarks of whole models, on a CPU with sizes of nothing."""

import json
import sys

import pytest

from bench import whole

TINY = whole.Sizes(32, 32, 1, 2, 2, 9)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(whole, "SIZES", {"1M": TINY})
    monkeypatch.setattr(whole, "device", lambda: "cpu")


@pytest.mark.parametrize("peer", ["deltarule", "deltarule-attention", "transformers"])
def test_generation_is_timed_beside_its_floor(peer, tmp_path):
    if peer == "transformers":
        pytest.importorskip("transformers")
    output = tmp_path / "generate.json"
    small = {"model": ("1M",), "peer": (peer,), "batch": (1, 2), "new_tokens": 3}
    whole.bench_generate(whole.GenerateBenchRun(**small, output=output))
    rows = json.loads(output.read_text())["rows"]
    assert [row["batch"] for row in rows] == [1, 2]
    assert all(row["ms_per_token"] > 0 and row["floor_ms"] > 0 for row in rows)


@pytest.mark.parametrize("peer", ["deltarule", "transformers"])
def test_training_is_timed(peer, tmp_path, capsys):
    if peer == "transformers":
        pytest.importorskip("transformers")
    output = tmp_path / "train.json"
    whole.bench_train(whole.TrainBenchRun(model=("1M",), peer=(peer,), output=output))
    assert "no CUDA device: timed on the CPU" in capsys.readouterr().out
    (row,) = json.loads(output.read_text())["rows"]
    assert row["eager_ms"] > 0
    assert "graph_ms" not in row


def test_a_compiled_peer_is_compiled_before_it_is_timed():
    def compiled(part):
        return part._compiled_call_impl is not None

    for peer in ("deltarule", "deltarule-compiled"):
        blocks = whole.built(peer, TINY, "cpu")[0].blocks
        assert [compiled(block) for block in blocks] == [peer == "deltarule-compiled"]
    pytest.importorskip("transformers")
    for peer in ("transformers", "transformers-compiled"):
        model = whole.built(peer, TINY, "cpu")[0].model
        assert compiled(model) == (peer == "transformers-compiled")


def test_fla_has_as_many_channels_as_ours(monkeypatch):
    told = []
    monkeypatch.setattr(whole, "build_fla", lambda *given, **options: told.append((given, options)))
    whole.built("fla", TINY, "cpu")
    ((prefix, ours, given, _), options) = told[0]
    layer = whole.built("deltarule", TINY, "cpu")[0].blocks[0]
    assert prefix == "GatedDeltaNet"
    assert options == {"whole_logits": False}
    assert (ours.vocab_size, ours.num_layers) == (TINY.vocab_size, TINY.num_layers)
    assert given["num_heads"] * given["head_dim"] == layer.mixer.k_proj.out_features
    assert given["expand_v"] * layer.mixer.k_proj.out_features == layer.mixer.v_proj.out_features
    assert given["intermediate_size"] == layer.mlp.up_proj.out_features


def test_a_step_that_cannot_be_captured_leaves_its_eager_figures(monkeypatch):
    def figures(step, text):
        if step.graphs:
            raise RuntimeError("not permitted when stream is capturing")
        return {"eager_ms": 1.0}

    monkeypatch.setattr(whole, "time_steps", figures)
    step = whole.TrainingStep

    def captured(*given, **options):
        made = step(*given, **options)
        made.graphs = options["cuda_graphs"]
        return made

    monkeypatch.setattr(whole, "TrainingStep", captured)
    # As on a GPU, where steps are timed both ways.
    monkeypatch.setattr(whole, "kinds_of_steps", lambda device: (False, True))
    row = whole.time_training("deltarule", TINY, "cpu")
    assert row["eager_ms"] == 1
    assert row["graph_error"] == "RuntimeError: not permitted when stream is capturing"


def test_a_cpu_takes_the_smallest_model_unless_it_is_told(monkeypatch):
    runs = whole.GenerateBenchRun, whole.TrainBenchRun
    assert [run().model for run in runs] == [("1M",), ("1M",)]
    monkeypatch.setattr(whole, "device", lambda: "cuda")
    assert [run().model for run in runs] == [("1.5B",), ("1M", "148M", "1.5B")]


def test_a_peer_that_is_missing_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    output = tmp_path / "train.json"
    whole.bench_train(whole.TrainBenchRun(peer=("transformers",), output=output))
    (row,) = json.loads(output.read_text())["rows"]
    assert "the extra 'hf'" in row["error"]


def test_what_a_case_raises_is_its_row(tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(whole, "time_training", broken)
    output = tmp_path / "train.json"
    whole.bench_train(whole.TrainBenchRun(model=("1M",), peer=("deltarule",), output=output))
    (row,) = json.loads(output.read_text())["rows"]
    assert row["error"] == "RuntimeError: out of memory"
