"""The cells are what they say; figure and table take what there is."""

from dataclasses import replace

import pytest
import torch

from experiments import niah
from experiments.experiment import Result
from experiments.records import plain


def fake(cell, share):
    evaluations = {one.label: {"sequence_accuracy": share} for one in cell.evaluations}
    return Result(cell.name, plain(cell), {"evaluations": evaluations}, None, 1.0)


def test_the_gpu_form_has_every_needle_at_the_lengths_of_the_paper():
    for cell in niah.cells("gpu"):
        configs = [one.config for one in cell.evaluations]
        assert {(c.haystack, c.value) for c in configs} == set(niah.NEEDLES.values())
        assert {c.length for c in configs} == {1024, 2048, 4096, 8192}
        assert {one.rows for one in cell.evaluations} == {500}
        assert all(c.instructions for c in configs)


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_prose_of_the_test_is_not_that_of_training(scale):
    for cell in niah.cells(scale):
        assert cell.training.split == "training"
        assert {one.config.split for one in cell.evaluations} == {"validation"}


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_states_are_of_one_size(scale):
    sizes = {
        tuple(tuple(state["recurrent"].shape) for state in cell.build().init_state(1))
        for cell in niah.cells(scale)
    }
    heads = niah.FORMS[scale].num_heads
    assert sizes == {((1, heads, 64, 64), (1, heads, 64, 64))}


def test_a_cell_runs(tmp_path):
    cell = niah.cells("laptop")[1]
    short = replace(
        cell, rows=2, watched_rows=2, loop=replace(cell.loop, steps=1, evaluate_every=1),
        evaluations=tuple(replace(one, rows=2) for one in cell.evaluations[:2]),
    )  # fmt: skip
    figures = short.run(tmp_path, torch.device("cpu"))
    assert list(figures["evaluations"]) == ["S-NIAH-1, 256", "S-NIAH-2, 256"]


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_figure_and_table_survive_gaps(tmp_path, scale):
    cells = [cell for cell in niah.cells(scale) if not cell.name.startswith("mamba2")]
    results = [fake(cell, 0.5) for cell in cells]
    failed = niah.cells(scale)[1]
    results.append(Result(failed.name, plain(failed), {}, "DivergedError: at step 3", 1.0))
    niah.draw(scale, results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    lines = niah.table(scale, results).splitlines()
    form = niah.FORMS[scale]
    ours = " | ".join([", ".join(["50.0"] * len(form.seeds))] * len(form.lengths))
    none = " | ".join(["-"] * len(form.lengths))
    assert f"| S-NIAH-1 | DeltaNet | {ours} | 97.4 | 96.8 | 99.0 | 98.8 |" in lines
    assert f"| S-NIAH-2 | Mamba-2 | {none} | 99.4 | 98.8 | 56.2 | 17.0 |" in lines
    assert f"| S-NIAH-1 | Linear attention | {ours} | - | - | - | - |" in lines
    assert any("failed" in line and failed.name in line for line in lines)
