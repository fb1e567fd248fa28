import pytest
import torch

from bench import adapters
from deltarule.models import ModelConfig, count_parameters
from experiments import throughput
from experiments.experiment import Result, load_experiment
from experiments.throughput import FLA, LENGTHS, MODELS, ThroughputCell

CPU = torch.device("cpu")
EXPERIMENT = load_experiment("throughput")
TINY = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, layer_types="gated_deltanet_h1",
    window=8,
)  # fmt: skip


def timed(peer, folder):
    cell = ThroughputCell(
        name=f"{peer}-tiny", peer=peer, system="gated_deltanet_h1", model=TINY, tokens=64,
        lengths=(16, 32), steps=1, warm_up=0,
    )  # fmt: skip
    return cell.run(folder / "cell", CPU)["lengths"]


def test_a_model_of_ours_is_timed_at_every_length(tmp_path):
    figures = timed("deltarule", tmp_path)
    assert figures.keys() == {"16", "32"}
    for row in figures.values():
        assert row["tokens_per_s"] > 0
        assert row["parameters"] == count_parameters(TINY)
        assert 3 < row["loss"] < 6


def test_what_does_not_run_is_told_and_the_other_lengths_go_on(monkeypatch, tmp_path):
    def sometimes(*built, tokens, real=throughput.time_steps, **options):
        if tokens == 16:
            raise RuntimeError("out of memory\nand much more")
        return real(*built, tokens=tokens, **options)

    monkeypatch.setattr(throughput, "time_steps", sometimes)
    figures = timed("deltarule", tmp_path)
    assert figures["16"] == {"error": "RuntimeError: out of memory"}
    assert figures["32"]["tokens_per_s"] > 0


def test_a_model_of_fla_is_built_from_the_same_sizes(monkeypatch, tmp_path):
    def built(prefix, ours, options, device):
        assert (prefix, ours, options) == (
            "GatedDeltaNet",
            TINY,
            FLA["gated_deltanet_h1"]["options"],
        )
        return throughput.build_ours(ours, device)

    monkeypatch.setattr(throughput, "build_fla", built)
    monkeypatch.setenv("FLA_FLASH_QLA", "")
    assert timed("fla", tmp_path)["16"]["parameters"] == count_parameters(TINY)


@pytest.mark.parametrize("installed", [False, True])
def test_fla_is_beside_ours_where_it_is_installed(installed, monkeypatch):
    monkeypatch.setattr(adapters, "installed", lambda name: installed)
    names = [cell.name for cell in EXPERIMENT.cells("gpu")]
    theirs = [f"fla-{name}" for name in FLA] if installed else []
    assert names == [*(f"deltarule-{name}" for name in MODELS), *theirs]


def test_what_did_not_run_is_told_in_the_table():
    rows = [
        {"tokens_per_s": 50_000.0, "peak_GiB": 60.0, "parameters": 1_300_000_000},
        {"error": "OutOfMemoryError: too large"},
    ]
    figures = {"lengths": {str(n): rows[n == 16_384] for n in LENGTHS}}
    ours = Result("deltarule-attention", {"peer": "deltarule", "system": "attention"}, figures)
    theirs = Result("fla-attention", ours.cell | {"peer": "fla"}, figures)
    table = EXPERIMENT.table("gpu", [ours, theirs])
    assert "| Softmax attention | deltarule | 1.30 B | 50.0 (55) |" in table
    assert "| - (26) | 60 |" in table
    assert "- deltarule-attention, 16384: OutOfMemoryError: too large" in table
    assert "FLA was not installed" not in table
    assert "FLA was not installed" in EXPERIMENT.table("gpu", [ours])
