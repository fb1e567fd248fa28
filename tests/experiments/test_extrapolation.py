import pytest

from experiments.extrapolation import EXPERIMENT, READ, TRAINED, by_position
from experiments.table import load_experiment
from text_results import failed, text_result


@pytest.mark.parametrize(("scale", "factor"), [("laptop", 16), ("gpu", 32)])
def test_models_are_read_far_past_the_length_of_training(scale, factor):
    for cell in EXPERIMENT.cells(scale):
        assert cell.lengths == (cell.length, factor * cell.length)
        assert cell.length == TRAINED[scale]
        assert max(cell.lengths) == READ[scale]
        assert cell.rows * cell.length == (1024, 8192)[scale == "gpu"]


def results(scale):
    return [text_result(cell, 2.0 + 0.1 * i) for i, cell in enumerate(EXPERIMENT.cells(scale))]


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_table_and_figure(scale, tmp_path):
    path = tmp_path / "figure.png"
    EXPERIMENT.draw(scale, results(scale), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    table = EXPERIMENT.table(scale, results(scale))
    assert f"at {READ[scale]:,}" in table
    assert "+0.34 (8 x the length)" in table


def test_seeds_of_a_system_come_together_and_failures_are_told():
    runs = results("gpu")
    broken = failed(EXPERIMENT.cells("gpu")[0], "DivergedError: at step 9")
    found = by_position([broken, *runs[1:]])
    assert len(found["deltanet"]) == 2
    assert len(found["linear_attention"]) == 1
    assert "failed: `linear_attention-seed0`" in EXPERIMENT.table("gpu", [broken, *runs[1:]])


def test_it_is_in_the_table_of_experiments():
    assert load_experiment("extrapolation") is EXPERIMENT
    assert EXPERIMENT.deviations.keys() == EXPERIMENT.needs.keys()
