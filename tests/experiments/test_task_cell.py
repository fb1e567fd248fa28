"""A cell that trains on a task: it learns, stops when it may, and goes on to the same bits."""

import json
from dataclasses import replace

import pytest
import torch

from deltarule.models import ModelConfig
from deltarule.tasks.mqar import Config
from deltarule.train.loop import LoopOptions
from deltarule.train.optimizer import OptimizerOptions
from experiments import task_cell
from experiments.task_cell import Curriculum, Evaluation, TaskCell
from small import crash_at

TASK = Config(length=8, pairs=2, vocab_size=8)
LONGER = Config(length=16, pairs=2, vocab_size=8)
CPU = torch.device("cpu")
CELL = TaskCell(
    name="cell", task="mqar", training=TASK, rows=32, watched_rows=64,
    evaluations=(Evaluation("same", TASK, 300), Evaluation("longer", LONGER, 40, prefixes=(1, 2))),
    model=ModelConfig(
        vocab_size=8, hidden_size=16, num_layers=2, layer_types="deltanet", num_heads=2,
        conv_size=0, mlp_size=0, norm_eps=1e-2,
    ),
    optimizer=OptimizerOptions(lr=2e-2, warmup_steps=10),
    loop=LoopOptions(steps=12, save_every=5, evaluate_every=4),
)  # fmt: skip


def test_a_cell_learns_and_returns_what_json_can_hold(tmp_path):
    cell = replace(CELL, loop=LoopOptions(steps=300, evaluate_every=50))
    figures = cell.run(tmp_path, CPU)
    assert figures["evaluations"]["same"]["accuracy"] > 0.75
    assert set(figures["evaluations"]["longer"]) == {"accuracy", "sequence_accuracy", "prefixes"}
    assert [point[0] for point in figures["curve"]] == list(range(50, 301, 50))
    assert figures["curve"][-1][1] < figures["curve"][0][1]
    assert figures["steps"] == 300
    assert not figures["stopped_early"]
    assert json.loads(json.dumps(figures)) == figures


def test_each_seed_draws_rows_of_its_own():
    jobs = [
        replace(CELL, loop=replace(CELL.loop, seed=seed)).lessons(False).job for seed in (0, 0, 1)
    ]
    (first, *_), (same, *_), (other, *_) = (job.next() for job in jobs)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_each_seed_is_measured_on_rows_of_its_own(monkeypatch):
    drawn = []
    monkeypatch.setattr(task_cell, "measure", lambda *given: drawn.append(given[3].tokens))
    for seed in (0, 0, 1):
        cell = replace(CELL, loop=replace(CELL.loop, seed=seed))
        cell.measure(cell.evaluations[0], None)
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0] != drawn[2]).any()


@pytest.mark.parametrize(
    "changes",
    [{}, {"examples": 100}, {"curriculum": Curriculum(8, 12, 100.0)}, {"stop_at": 0.0}],
    ids=["new", "examples", "curriculum", "stopped"],
)
def test_a_crashed_cell_goes_on_to_the_same_figures(tmp_path, monkeypatch, changes):
    cell = replace(CELL, **changes)
    straight = cell.run(tmp_path / "straight", CPU)
    step = 3 if "stop_at" in changes else 7
    crash_at(step, monkeypatch, lambda: cell.run(tmp_path / "crashed", CPU))
    resumed = cell.run(tmp_path / "crashed", CPU)
    for name in set(straight) - {"training_seconds"}:
        assert straight[name] == resumed[name], name
    # A cell whose training was complete is only measured again.
    again = cell.run(tmp_path / "crashed", CPU)
    assert again == resumed


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes", [{"examples": 100}, {"curriculum": Curriculum(8, 12, 100.0)}],
    ids=["examples", "curriculum"],
)  # fmt: skip
def test_steps_as_graphs_have_the_figures_of_eager_ones(tmp_path, changes):
    cell = replace(CELL, **changes, loop=LoopOptions(steps=40, evaluate_every=10))
    eager = replace(cell, loop=replace(cell.loop, cuda_graphs=False))
    found = [
        one.run(tmp_path / str(one.loop.cuda_graphs), torch.device("cuda")) for one in (cell, eager)
    ]
    graphs, plain = ({k: v for k, v in one.items() if k != "training_seconds"} for one in found)
    assert graphs == plain


def test_training_ends_once_it_is_good_enough(tmp_path):
    figures = replace(CELL, stop_at=0.0).run(tmp_path, CPU)
    assert (figures["steps"], figures["stopped_early"]) == (4, True)
    assert [point[0] for point in figures["curve"]] == [4]
