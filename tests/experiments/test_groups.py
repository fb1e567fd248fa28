"""The cells are what they say; figure and table take what there is."""

from dataclasses import replace

import pytest
import torch

from experiments import groups
from experiments.experiment import Result
from experiments.records import plain


def fake(cell, share):
    if cell.name.startswith("exact"):
        figures = {"n_steps": 2, "accuracy": 1.0, "error": 1e-13}
    else:
        prefixes = [[n, share if n < 100 else 0.0] for n in cell.evaluations[0].prefixes]
        figures = {"evaluations": {groups.LABEL: {"prefixes": prefixes}}}
    return Result(cell.name, plain(cell), figures, None, 1.0)


def trained(scale):
    return [cell for cell in groups.cells(scale) if not cell.name.startswith("exact")]


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
def test_names_tell_cells_apart(scale):
    cells = groups.cells(scale)
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in trained(scale):
        least = 1 - cell.model.beta_max
        group, writes = cell.training.group, cell.model.n_steps
        assert cell.name == f"{group}-n{writes}-from{least:g}-seed{cell.loop.seed}"


def test_exact_weights_are_run_on_long_rows(tmp_path):
    cell = next(c for c in groups.cells("laptop") if c.name == "exact-A_5-rotations")
    assert cell.tokens == 20_000
    figures = replace(cell, tokens=500).run(tmp_path, torch.device("cpu"))
    assert figures["n_steps"] == 2
    assert figures["accuracy"] == 1.0
    assert figures["error"] < 1e-10


def test_a_cell_runs(tmp_path):
    cell = trained("laptop")[0]
    short = replace(
        cell, rows=4, watched_rows=4, loop=replace(cell.loop, steps=2, evaluate_every=1),
        evaluations=tuple(replace(one, rows=4) for one in cell.evaluations),
    )  # fmt: skip
    figures = short.run(tmp_path, torch.device("cpu"))
    lengths = [n for n, _ in figures["evaluations"][groups.LABEL]["prefixes"]]
    assert lengths == [4, 8, 16, 24, 32, 48, 64, 96, 128]


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_figure_and_table_survive_gaps(tmp_path, scale):
    cells = [cell for cell in groups.cells(scale) if "S_4-n1" not in cell.name]
    results = [fake(cell, 0.9) for cell in cells]
    results[0] = Result(cells[0].name, plain(cells[0]), {}, "DivergedError: at step 3", 1.0)
    groups.draw(scale, results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    lines = groups.table(scale, results).splitlines()
    seeds = len(groups.FORMS[scale].seeds)
    first = 0.9 if scale == "laptop" else 0.0
    shown = [", ".join([x] * seeds) for x in (f"{first:.3f}", "0.000", "96")]
    assert f"| S_3 | n = 2 | {' | '.join(shown)} |" in lines
    assert "| A_5 | rotations | 2 | 20,000 | 100.0% | 1e-13 |" in lines
    assert not any(line.startswith("| S_4 | n = 1 ") for line in lines)
    assert any("failed" in line and cells[0].name in line for line in lines)
