"""The benchmarks of whole models, on a CPU with sizes of nothing."""

import json

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
    whole.bench_generate(
        whole.GenerateBenchRun(
            model=("1M",), peer=(peer,), batch=(1, 2), new_tokens=3, output=output
        )
    )
    rows = json.loads(output.read_text())["rows"]
    assert [row["batch"] for row in rows] == [1, 2]
    assert all(row["ms_per_token"] > 0 and row["floor_ms"] > 0 for row in rows)


@pytest.mark.parametrize("peer", ["deltarule", "transformers"])
def test_training_is_timed(peer, tmp_path):
    if peer == "transformers":
        pytest.importorskip("transformers")
    output = tmp_path / "train.json"
    whole.bench_train(whole.TrainBenchRun(model=("1M",), peer=(peer,), output=output))
    (row,) = json.loads(output.read_text())["rows"]
    assert row["eager_ms"] > 0
    assert "graph_ms" not in row


def test_what_a_case_raises_is_its_row(tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(whole, "time_training", broken)
    output = tmp_path / "train.json"
    whole.bench_train(whole.TrainBenchRun(model=("1M",), peer=("deltarule",), output=output))
    (row,) = json.loads(output.read_text())["rows"]
    assert row["error"] == "RuntimeError: out of memory"
