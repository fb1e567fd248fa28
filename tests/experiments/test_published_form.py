"""The papers' own settings: sizes and steps are theirs, and each cell starts, stops and goes on."""

from dataclasses import replace

import pytest
import torch

from crash import crash_at
from experiments import mqar
from experiments.experiment import Result
from experiments.figures import title_of
from experiments.records import plain
from experiments.table import load_experiment

CPU = torch.device("cpu")
MQAR, TRACKING = load_experiment("mqar"), load_experiment("state-tracking")
BY_SYSTEM = [cell for cell in MQAR.cells("published") if "-d64-lr0.0001-" in cell.name]


def test_recall_has_the_figures_epochs_and_rates_and_the_usual_epsilon():
    cells = MQAR.cells("published")
    assert len(cells) == len({cell.name for cell in cells}) == 8 * 3 * 4
    assert {cell.loop.steps for cell in cells} == {64 * (100_000 // 128)}
    assert {cell.optimizer.lr for cell in cells} == {1e-4, 4.6e-4, 2.15e-3, 1e-2}
    assert {cell.model.norm_eps for cell in cells} == {1e-5}
    with torch.device("meta"):
        bare = {
            cell.name.split("-d")[0]: "conv.weight"
            in "".join(dict(cell.build().named_parameters()))
            for cell in BY_SYSTEM
        }
    assert bare["mamba2"]
    assert not bare["mamba2-no-conv"]
    assert next(c for c in BY_SYSTEM if c.name.startswith("retnet")).model.num_heads == 8


def test_state_tracking_has_the_papers_steps_and_batch():
    cells = TRACKING.cells("published")
    assert len(cells) == 36
    assert {(cell.rows, cell.loop.steps) for cell in cells} == {(1024, 100_000)}
    assert cells[0].task == "modular_arithmetic"


@pytest.mark.parametrize(
    "cell",
    [BY_SYSTEM[0], BY_SYSTEM[3], TRACKING.cells("published")[1]],
    ids=lambda cell: cell.name,
)
def test_a_cell_starts_and_goes_on_to_the_same_figures(cell, tmp_path, monkeypatch):
    watched = cell.evaluations[0]
    if cell.task == "mqar":
        config = replace(cell.training, length=32, pairs=4, vocab_size=64)
    else:
        config = replace(cell.training, longest=8)
    short = replace(
        cell,
        training=config,
        rows=4,
        watched_rows=4,
        examples=cell.examples and 16,
        evaluations=(replace(watched, config=config, rows=8),),
        model=replace(cell.model, hidden_size=32, head_k_dim=None, head_v_dim=None),
        loop=replace(cell.loop, steps=4, evaluate_every=2, save_every=1),
    )
    straight = short.run(tmp_path / "straight", CPU)
    crash_at(2, monkeypatch, lambda: short.run(tmp_path / "stopped", CPU))
    resumed = short.run(tmp_path / "stopped", CPU)
    assert {k: v for k, v in straight.items() if k != "training_seconds"} == {
        k: v for k, v in resumed.items() if k != "training_seconds"
    }


def test_a_table_tells_a_system_from_the_one_without_its_convolution():
    results = [
        Result(
            cell.name,
            plain(cell),
            {
                "evaluations": {mqar.LABEL: {"accuracy": 0.5 + 0.25 * ("no-conv" in cell.name)}},
                "steps": 9,
                "curve": [[9, 1.0, 0.5]],
            },
        )
        for cell in BY_SYSTEM
    ]
    lines = mqar.table(MQAR.forms["published"], results).splitlines()
    assert any(x.startswith("| Mamba-2 | 50.0% in 9 steps") for x in lines)
    assert any(x.startswith(f"| {title_of('mamba2-no-conv')} | 75.0% in 9 steps") for x in lines)
