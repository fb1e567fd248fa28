"""Whatever the table of experiments holds can be planned, sent to a process, drawn and told."""

import dataclasses
import json
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch

from deltarule.models import CausalLM
from deltarule.tasks import load_task
from experiments.experiment import EXPERIMENTS, SCALES, load_experiment
from experiments.pages import section
from experiments.records import completed, plain, read_json, to_results
from experiments.task_cell import TaskCell

DOCS = Path(__file__).parents[2] / "docs" / "experiments"
FORMS = [(name, scale) for name in EXPERIMENTS for scale in load_experiment(name).words.needs]
PUBLISHED = [(name, scale) for name, scale in FORMS if (DOCS / f"{name}-{scale}.json").exists()]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_what_it_is(name):
    experiment = load_experiment(name)
    words = experiment.words
    assert experiment.name == name
    assert words.title
    assert words.shows.endswith(".")
    assert words.source
    assert words.deviations.keys() == words.needs.keys() <= set(SCALES)
    for scale, lines in words.deviations.items():
        assert all(line.endswith(".") for line in lines), scale
        assert lines or name == "memory"
    assert experiment.forms.keys() == words.needs.keys()
    assert experiment.timed == (name in ("speedup", "throughput"))


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


@pytest.mark.parametrize(("name", "scale"), FORMS)
def test_models_fit_their_tasks(name, scale):
    seen = set()
    for cell in load_experiment(name).cells(scale):
        cell = getattr(cell, "first", cell)
        if not isinstance(cell, TaskCell) or (key := (cell.task, cell.model)) in seen:
            continue
        seen.add(key)
        with torch.device("meta"):
            assert isinstance(cell.build(), CausalLM)
        assert cell.model.vocab_size == cell.training.vocab_size
        assert load_task(cell.task).Config is type(cell.training)


@pytest.mark.parametrize(("name", "scale"), PUBLISHED)
def test_published_results_are_of_the_cells_that_would_run(name, scale):
    """A configuration is what it was, but for fields that are new: what was started goes on."""
    ours = {cell.name: cell for cell in load_experiment(name).cells(scale)}
    for record in read_json(DOCS / f"{name}-{scale}.json")["cells"]:
        cell = ours[record["cell"]["name"]]
        # Needles of before have prose of the Python that ran them.
        text = {"text": cell.text} if name == "niah" else {}
        assert completed(text | record["cell"], cell) == plain(cell), cell.name


@pytest.mark.parametrize(("name", "scale"), PUBLISHED)
def test_figure_and_table_survive_gaps_and_failures_are_told(name, scale, tmp_path):
    experiment, report = load_experiment(name), read_json(DOCS / f"{name}-{scale}.json")
    results = to_results(report["cells"])
    gone = results[0].name.partition("-seed")[0]
    left = [one for one in results if not one.name.startswith(gone)] or results
    experiment.draw(scale, left, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert experiment.table(scale, left).startswith(("| ", "Learned"))
    report["cells"][0] |= {"error": "DivergedError: at step 9", "figures": {}}
    lines = section(experiment, report, raw="results.json", picture=None)
    assert f"- `{results[0].name}`: DivergedError: at step 9" in lines


@pytest.mark.parametrize(
    ("name", "scale", "index", "labels"),
    [
        ("groups", "laptop", 0, ["new rows"]),
        ("niah", "laptop", 1, ["S-NIAH-1, 256", "S-NIAH-2, 256"]),
        ("state-tracking", "laptop", 3, ["lengths 40 to 256", "length 32"]),
        ("mad", "gpu", 0, ["new rows"]),
    ],
)
def test_a_cell_of_every_kind_runs(name, scale, index, labels, tmp_path):
    cell = load_experiment(name).cells(scale)[index]
    tests = tuple(replace(one, rows=4) for one in cell.evaluations[:2])
    loop, examples = replace(cell.loop, steps=2, evaluate_every=1, dtype="float32"), cell.examples
    short = replace(cell, rows=4, watched_rows=4, loop=loop, evaluations=tests)
    found = replace(short, examples=examples and 16).run(tmp_path, torch.device("cpu"))
    assert list(found["evaluations"]) == labels
    assert found["steps"] == 2
    if prefixes := cell.evaluations[0].prefixes:
        assert [n for n, _ in found["evaluations"]["new rows"]["prefixes"]] == list(prefixes)
