"""The cells are the paper's where they say so."""

from dataclasses import replace

import pytest

from deltarule.nn import DeltaNet, Mamba2
from deltarule.tasks import load_task, parity
from experiments import state_tracking
from experiments.experiment import Result
from experiments.records import plain
from experiments.signed_mamba2 import SignedMamba2
from experiments.table import load_experiment

TRACKING = load_experiment("state-tracking")


def fake(cell, accuracy):
    evaluations = {one.label: {"accuracy": accuracy} for one in cell.evaluations}
    return Result(cell.name, plain(cell), {"evaluations": evaluations})


def test_the_gpu_form_is_the_setting_of_the_paper():
    cells = TRACKING.cells("gpu")
    assert len(cells) == 3 * 4 * 3
    for cell in cells:
        config = load_task(cell.task).Config
        assert cell.training == config(3, 40)
        assert cell.evaluations[0].config == config(40, 256)
        assert cell.evaluations[0].rows == 8192
        assert cell.model.num_layers == (2 if cell.task == "parity" else 3)
        assert (cell.model.hidden_size, cell.model.num_heads, cell.model.conv_size) == (128, 4, 4)
        assert cell.optimizer.weight_decay == (0.0 if cell.task == "parity" else 0.1)
        assert (cell.rows, cell.loop.steps) == (256, 6000)


def test_the_range_of_eigenvalues_is_the_only_difference():
    cells = {cell.name: cell for cell in TRACKING.cells("laptop")}
    for layer, positive, signed in (("deltanet", 1.0, 2.0), ("mamba", None, None)):
        first, second = (cells[f"parity-{layer}{kind}-seed0"] for kind in ("01", "11"))
        assert first.model.beta_max == positive
        assert second.model.beta_max == signed
        assert replace(first.model, beta_max=None) == replace(second.model, beta_max=None)
        assert second.signed == (layer == "mamba")


def test_cells_build_the_layer_that_they_name():
    kinds = {"deltanet01": DeltaNet, "deltanet11": DeltaNet, "mamba01": Mamba2}
    for cell in TRACKING.cells("laptop")[:4]:
        mixer = cell.build().blocks[0].mixer
        assert type(mixer) is kinds.get(cell.name.split("-")[1], SignedMamba2)


def test_accuracy_is_scaled_by_chance():
    cell = TRACKING.cells("laptop")[0]
    assert state_tracking.scaled(fake(cell, 0.5), "length 32") == 0
    assert state_tracking.scaled(fake(cell, 0.75), "length 32") == 0.5
    arithmetic = TRACKING.cells("gpu")[0]
    assert state_tracking.scaled(fake(arithmetic, 0.2), "length 32") == pytest.approx(0)


def test_parity_of_the_laptop_form_asks_after_every_bit():
    for cell in TRACKING.cells("laptop"):
        assert cell.training == parity.Config(33, 33, every_position=True)
