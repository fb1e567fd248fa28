"""The cells are those of the paper, and exact weights are exact."""

from dataclasses import replace

import pytest
import torch

from experiments.table import load_experiment
from experiments.task_cell import TaskCell

GROUPS = load_experiment("groups")


def trained(scale):
    return [cell for cell in GROUPS.cells(scale) if isinstance(cell, TaskCell)]


def test_the_gpu_form_has_every_group_and_the_lengths_of_the_paper():
    cells = trained("gpu")
    assert {cell.training.group for cell in cells} == {"S_3", "S_4", "A_5", "S_5"}
    for cell in cells:
        assert (cell.training.length, cell.evaluations[0].config.length) == (128, 512)
        assert cell.model.layer_types == ("delta_product",)
        assert (cell.model.num_layers, cell.model.hidden_size) == (1, 128)
    writes = {cell.model.n_steps for cell in cells if cell.training.group == "S_5"}
    assert writes == {1, 2, 3, 4}


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_names_say_what_a_cell_is(scale):
    for cell in trained(scale):
        least = 1 - cell.model.beta_max
        group, writes = cell.training.group, cell.model.n_steps
        assert cell.name == f"{group}-n{writes}-from{least:g}-seed{cell.loop.seed}"


def test_exact_weights_are_run_on_long_rows(tmp_path):
    cell = next(c for c in GROUPS.cells("laptop") if c.name == "exact-A_5-rotations")
    assert cell.tokens == 20_000
    figures = replace(cell, tokens=500).run(tmp_path, torch.device("cpu"))
    assert figures["n_steps"] == 2
    assert figures["accuracy"] == 1.0
    assert figures["error"] < 1e-10
