"""The leaderboard: every system on every task, entries that go on, and a table that grows."""

import json
import re
from dataclasses import replace

import pytest
import torch

from deltarule.nn import SYSTEMS
from experiments import leaderboard
from experiments.experiment import Result, load_experiment
from experiments.leaderboard import Entry, Scored, bands
from experiments.records import plain
from experiments.reproduce import ReproduceRun, reproduce

CPU = torch.device("cpu")
BOARD = load_experiment("leaderboard")


def short(cell: Entry, **changes) -> Entry:
    tests = tuple(replace(one, rows=8) for one in cell.first.evaluations)
    loop = replace(cell.first.loop, steps=2)
    first = replace(cell.first, rows=4, watched_rows=4, loop=loop, evaluations=tests)
    return replace(cell, first=first, **changes)


def result(cell: Entry, *scores: float) -> Result:
    return Result(cell.name, plain(cell), {"scores": list(scores)})


def test_the_best_rate_is_run_with_every_seed_and_nothing_twice(tmp_path, monkeypatch):
    cell = short(BOARD.cells("laptop")[0], rates=(1e-2, 3e-3), seeds=(0, 1, 2))
    ran = []
    run = type(cell.first).run

    def counted(one, folder, device):
        ran.append((one.optimizer.lr, one.loop.seed))
        if len(ran) == 3:
            raise KeyboardInterrupt
        figures = run(one, folder, device)
        accuracy = 0.9 if one.optimizer.lr == 3e-3 else 0.5
        return figures | {"evaluations": {"new rows": {"accuracy": accuracy}}}

    monkeypatch.setattr(type(cell.first), "run", counted)
    with pytest.raises(KeyboardInterrupt):
        cell.run(tmp_path, CPU)
    figures = cell.run(tmp_path, CPU)
    assert ran == [(1e-2, 0), (3e-3, 0), (3e-3, 1), (3e-3, 1), (3e-3, 2)]
    assert figures["rate"] == 3e-3
    chance = cell.first.evaluations[0].config.chance
    assert figures["scores"] == pytest.approx([(0.9 - chance) / (1 - chance)] * 3)
    assert json.loads(json.dumps(figures)) == figures


def test_text_wants_few_bits_and_tasks_many_right_answers():
    low, high = Scored("a", [1.5, 1.6], True), Scored("b", [1.9, 2.0], True)
    assert bands([low, high]) == {"a": 1, "b": 2}
    near = [Scored("a", [1.0], False), Scored("b", [0.95], False), Scored("c", [0.5], False)]
    assert bands(near) == {"a": 1, "b": 1, "c": 2}


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_the_table_shows_what_is_there_and_what_is_to_run(tmp_path, scale):
    given = BOARD.cells(scale)
    results = [result(given[0], 0.5, 0.75), result(given[1], 0.1)]
    lines = leaderboard.table(BOARD.forms[scale], results).splitlines()
    first, second, third = list(SYSTEMS)[:3]
    assert lines[2].startswith(f"| `{first}` ")
    assert lines[2].endswith("| 0.625 (0.500 to 0.750), band 1 |")
    assert lines[3].startswith(f"| `{second}` ")
    assert next(x for x in lines if x.startswith(f"| `{third}` ")).endswith("| to run |")
    assert (
        sum(f"to run: {len(SYSTEMS)} of" in x for x in lines)
        == len(BOARD.forms[scale]["columns"]) - 1
    )
    longer = {key: one | {"steps": 7} for key, one in BOARD.forms[scale]["columns"].items()}
    text = leaderboard.table(BOARD.forms[scale] | {"columns": longer}, [])
    assert re.findall(r"(\d+) steps of (?:128|\d+ new)", text) == ["7"] * (7 * (scale == "gpu"))
    BOARD.draw(scale, results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_new_row_joins_those_that_are_published(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [short(cell, rates=(1e-2,), seeds=(0,)) for cell in BOARD.cells("laptop")[:2]]
    monkeypatch.setattr(leaderboard, "cells", lambda form: given)

    def published(runs: str, only: str, seconds: float | None = None) -> list[dict]:
        where = {"runs": tmp_path / runs, "publish": tmp_path / "docs"}
        options = {"only": (only,), "seconds": seconds, "device": "cpu", "workers": 1}
        reproduce(ReproduceRun("leaderboard", **options, **where))
        return json.loads((tmp_path / "docs/leaderboard-laptop.json").read_text())["cells"]

    first = published("mine", given[0].name)
    assert [one["cell"]["name"] for one in first] == [given[0].name]
    both = published("of somebody else", given[1].name)
    assert both[0] == first[0]
    assert [one["cell"]["name"] for one in both] == [cell.name for cell in given]
    # What was published at other settings is run again.
    given[0] = replace(given[0], seeds=(1,))
    left = published("third", given[0].name, seconds=0)
    assert [one["cell"]["name"] for one in left] == [given[1].name]
