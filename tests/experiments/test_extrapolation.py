import pytest

from experiments.table import load_experiment


@pytest.mark.parametrize(("scale", "factor"), [("laptop", 16), ("gpu", 32)])
def test_models_are_read_far_past_the_length_of_training(scale, factor):
    for cell in load_experiment("extrapolation").cells(scale):
        assert cell.lengths == (cell.length, factor * cell.length)
        assert cell.rows * cell.length == (1024, 8192)[scale == "gpu"]
