import dataclasses

import pytest
import torch

from experiments.regbench import LABEL, make_cell
from experiments.settings import merged
from experiments.table import load_experiment

REGBENCH = load_experiment("regbench")


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_names_say_what_has_a_convolution(scale):
    for cell in REGBENCH.cells(scale):
        bare = cell.model.layer_types[0] == "attention" or "no-conv" in cell.name
        assert (cell.model.conv_size == 0) == bare
        # Whole epochs of the rows that fill a batch.
        assert cell.loop.steps % (cell.examples // cell.rows) == 0


def test_a_short_run_is_better_than_any_letter(tmp_path):
    task = {"longest_word": 4, "most_words": 12}
    model = {"hidden_size": 32, "num_layers": 1, "head_k_dim": 16, "head_v_dim": 16}
    small = {"task": task, "epochs": 1, "model": model, "cell": {"watched_rows": 50}}
    cell = make_cell(merged(REGBENCH.forms["laptop"], small), "deltanet", 2_500)
    evaluation = dataclasses.replace(cell.evaluations[0], rows=50)
    figures = dataclasses.replace(cell, evaluations=(evaluation,)).run(
        tmp_path, torch.device("cpu")
    )
    score = figures["evaluations"][LABEL]
    assert score["accuracy"] > 2 * score["uniform"]
    assert len(figures["curve"]) >= 20
