"""The cells are what they say."""

from dataclasses import replace

import pytest

from experiments import niah
from experiments.table import load_experiment

NIAH = load_experiment("niah")


def test_the_gpu_form_has_every_needle_at_the_lengths_of_the_paper():
    for cell in NIAH.cells("gpu"):
        configs = [one.config for one in cell.evaluations]
        assert {(c.haystack, c.value) for c in configs} == set(niah.NEEDLES.values())
        assert {c.length for c in configs} == {1024, 2048, 4096, 8192}
        assert {one.rows for one in cell.evaluations} == {500}
        assert all(c.instructions for c in configs)


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_prose_of_the_test_is_not_that_of_training(scale):
    for cell in NIAH.cells(scale):
        assert cell.training.split == "training"
        assert {one.config.split for one in cell.evaluations} == {"validation"}


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_states_are_of_one_size(scale):
    sizes = {
        tuple(tuple(state["recurrent"].shape) for state in cell.build().init_state(1))
        for cell in NIAH.cells(scale)
    }
    heads = NIAH.forms[scale]["model"]["num_heads"]
    assert sizes == {((1, heads, 64, 64), (1, heads, 64, 64))}


def test_a_run_that_starts_by_the_papers_draw_differs_in_nothing_else():
    cells = {cell.name: cell for cell in NIAH.cells("gpu")}
    spread, drawn = cells["mamba2-seed1"], cells["mamba2-drawn-seed1"]
    assert (spread.model.longest_horizon, drawn.model.longest_horizon) == (1024, None)
    model = replace(drawn.model, longest_horizon=1024)
    assert replace(drawn, name=spread.name, model=model) == spread
    assert {cell.model.longest_horizon for cell in NIAH.cells("laptop")} == {None}
