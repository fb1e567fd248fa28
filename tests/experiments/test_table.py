"""Whatever the table of experiments holds can be planned, sent to a process and written down."""

import dataclasses
import json
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest

from experiments.experiment import SCALES
from experiments.records import plain
from experiments.table import EXPERIMENTS, load_experiment

FORMS = [
    (name, scale)
    for name in EXPERIMENTS
    for scale in SCALES
    if scale in load_experiment(name).needs
]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_what_it_is(name):
    experiment = load_experiment(name)
    assert experiment.name == name
    assert experiment.title
    assert experiment.shows.endswith(".")
    assert experiment.source
    assert set(experiment.deviations) <= set(experiment.needs) <= set(SCALES)
    for scale, lines in experiment.deviations.items():
        assert all(line.endswith(".") for line in lines), scale


@pytest.mark.parametrize(("name", "scale"), FORMS)
def test_cells_are_plain_data_with_names_of_their_own(name, scale):
    cells = load_experiment(name).cells(scale)
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names) > 0
    for cell in cells:
        assert Path(cell.name).name == cell.name
        assert " " not in cell.name
        assert dataclasses.is_dataclass(cell)
        assert plain(cell)["name"] == cell.name
        assert json.dumps(plain(cell), allow_nan=False)
        assert ForkingPickler.dumps(cell)
    again = load_experiment(name).cells(scale)
    assert again == cells


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="NAME must be one of leaderboard, mqar"):
        load_experiment("nothing")
