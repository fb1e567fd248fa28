import dataclasses

import pytest
import torch

from experiments.experiment import Result
from experiments.records import plain
from experiments.regbench import EXPERIMENT, FORMS, LABEL, make_cell
from experiments.table import load_experiment
from text_results import failed


def language_result(cell, accuracy):
    score = {"accuracy": accuracy, "next_letter": 0.4, "uniform": 0.11}
    curve = [[100, 2.0, 0.3], [200, 1.0, accuracy + 0.01], [300, 1.0, accuracy]]
    return Result(
        cell.name, plain(cell), {"evaluations": {LABEL: score}, "curve": curve}, None, 60.0
    )


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_every_cell_can_be_built_and_told_apart(scale):
    cells = EXPERIMENT.cells(scale)
    assert len({cell.name for cell in cells}) == len(cells) == {"laptop": 3, "gpu": 12}[scale]
    for cell in cells:
        with torch.device("meta"):
            model = cell.build()
        bare = cell.model.layer_types[0] == "attention" or "no-conv" in cell.name
        assert (cell.model.conv_size == 0) == bare
        assert model.config.vocab_size == cell.training.vocab_size == 20
        # Whole epochs of the rows that fill a batch.
        assert cell.loop.steps % (cell.examples // cell.rows) == 0


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_table_and_figure(scale, tmp_path):
    cells = EXPERIMENT.cells(scale)
    results = [language_result(cell, 0.8) for cell in cells[:-1]]
    results.append(failed(cells[-1], "DivergedError: the loss is not finite"))
    path = tmp_path / "figure.png"
    EXPERIMENT.draw(scale, results, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    table = EXPERIMENT.table(scale, results)
    assert "81.0% (80.0%)" in table
    assert "11.0%" in table
    assert f"failed: `{cells[-1].name}`" in table
    if scale == "gpu":
        assert (
            "| DeltaNet, no convolution | 81.0% (80.0%) | 81.0% (80.0%) | 79.0 % | 85.1 % |"
            in table
        )
    assert "system" in EXPERIMENT.table(scale, [])


def test_it_is_in_the_table_of_experiments():
    assert load_experiment("regbench") is EXPERIMENT
    assert EXPERIMENT.deviations.keys() == EXPERIMENT.needs.keys()


def test_a_short_run_is_better_than_any_letter(tmp_path):
    form = FORMS["laptop"]
    small = dataclasses.replace(
        form, task=dataclasses.replace(form.task, longest_word=4, most_words=12), width=32,
        layers=1, epochs=1, watched=50,
    )  # fmt: skip
    cell = make_cell(small, "deltanet", 2_500)
    evaluation = dataclasses.replace(cell.evaluations[0], rows=50)
    figures = dataclasses.replace(cell, evaluations=(evaluation,)).run(
        tmp_path, torch.device("cpu")
    )
    score = figures["evaluations"][LABEL]
    assert score["accuracy"] > 2 * score["uniform"]
    assert len(figures["curve"]) >= 20
