"""The cells are the paper's where they say so; figure and table take what there is."""

import dataclasses

import pytest

from deltarule.tasks.mqar import Config
from experiments import mqar
from experiments.experiment import Result
from experiments.records import plain


def fake(cell, accuracy):
    figures = {
        "evaluations": {mqar.LABEL: {"accuracy": accuracy}}, "steps": 100,
        "curve": [[50, 2.0, accuracy / 2], [100, 1.0, accuracy]],
    }  # fmt: skip
    return Result(cell.name, plain(cell), figures, None, 1.0)


def test_the_gpu_form_has_the_task_of_the_figure_and_6_of_its_64_epochs():
    cells = mqar.cells("gpu")
    assert len(cells) == 7 * 2 * 2
    for cell in cells:
        assert cell.training == Config(length=512, pairs=64, vocab_size=8192)
        assert (cell.rows, cell.examples, cell.evaluations[0].rows) == (128, 100_000, 3000)
        assert (cell.model.num_layers, cell.model.mlp_size, cell.model.conv_size) == (2, 0, 0)
        assert cell.loop.steps == 6 * (100_000 // 128)


def test_states_are_of_one_size():
    sizes = {
        (cell.model.num_heads, cell.model.head_k_dim, cell.model.head_v_dim)
        for cell in mqar.cells("gpu")
        if cell.model.hidden_size == 64 and cell.model.layer_types[0] != "attention"
    }
    assert sizes == {(2, 32, 32)}


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_figure_and_table_show_the_best_rate_and_survive_gaps(tmp_path, scale, monkeypatch):
    two_seeds = dataclasses.replace(mqar.FORMS["laptop"], seeds=(0, 1))
    monkeypatch.setitem(mqar.FORMS, "laptop", two_seeds)
    cells = [cell for cell in mqar.cells(scale) if cell.model.layer_types[0] != "gla"]
    results = [fake(cell, 0.9 - 10 * cell.optimizer.lr - 0.1 * cell.loop.seed) for cell in cells]
    failed = mqar.cells(scale)[0]
    results[0] = Result(failed.name, plain(failed), {}, "DivergedError: at step 3", 1.0)
    mqar.draw(scale, results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    lines = {line.split(" | ")[0]: line for line in mqar.table(scale, results).splitlines()}
    assert "| - | - |" in lines["| GLA"]
    assert "95%" in lines["| GLA"]
    assert "81%" in lines["| Mamba"]
    shown = {"laptop": "75.0% (70.0% to 80.0%) in 100 and 100 steps", "gpu": "87.9% in 100 steps"}
    assert shown[scale] in lines["| DeltaNet"]
