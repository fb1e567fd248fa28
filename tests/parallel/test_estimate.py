"""Estimates of training steps beside those that were measured."""

import json
import re
import sys
from pathlib import Path

import plan_figure
import pytest
from matplotlib.image import imread

from bench import results, several_gpus
from deltarule.parallel.estimate import Division, best, estimate, room_to_keep
from deltarule.parallel.machine import MACHINES, Size, size_of
from deltarule.plan import PlanRun, plan

FIGURES = Path(__file__).parents[2] / "docs/figures/several_gpus_h200.json"
REPORT = results.load(FIGURES)
MEASURED = {row["case"]: row for row in REPORT["rows"]}
GPU = "h200" if "H200" in REPORT["device"] else "h100"
SIZE = Size(*(REPORT["config"][name] for name in ("num_layers", "hidden_size", "vocab_size")))
# Rows of the cases in that file, as divisions; batch is the tokens of all groups.
SHARDED, CONTEXT = (Division(shard=2, rows=8), 4096, 65_536), (Division(context=2), 65_536, 65_536)
CASES = {
    "alone": (Division(rows=8), 4096, 32_768),
    "sharded": SHARDED,
    "sharded, weights kept": SHARDED,
    "sharded, gradients in float32": SHARDED,
    "alone, one row": (Division(), 32_768, 32_768),
    "context and shards, one row": CONTEXT,
    "context and shards, one row, weights kept": CONTEXT,
    "heads": (Division(tensor=2, rows=8), 4096, 32_768),
}
BAR = 0.15


def test_every_measured_run_is_compared() -> None:
    """But those of which something was left out to learn what it costs."""
    assert MEASURED.keys() - CASES == {"sharded, nothing sent", "sharded, copy engines"}


@pytest.mark.parametrize("case", sorted(MEASURED.keys() & several_gpus.CASES.keys()))
def test_a_row_says_what_the_benchmark_would_file(case: str) -> None:
    facts = several_gpus.CASES[case]._asdict()
    if case == "heads":
        # Nothing is gathered where heads are split.
        del facts["kept"]
    assert facts.items() <= MEASURED[case].items()


@pytest.mark.parametrize("case", list(CASES))
def test_seconds_and_memory_are_those_measured(case: str) -> None:
    found, step = MEASURED[case], estimate(SIZE, MACHINES[GPU], *CASES[case])
    assert step is not None
    assert abs(1e3 * step.seconds / found["step_ms"] - 1) < BAR
    assert abs(step.memory / 2**30 / found["peak_gib"] - 1) < BAR


def test_the_page_has_the_raw_figures() -> None:
    page = (FIGURES.parents[1] / "several_gpus.md").read_text()
    # The page leaves out a way that went.
    for name, found in MEASURED.items():
        if name != "sharded, copy engines":
            rate, memory = f"{found['tokens_per_second_each']:,}", found["peak_gib"]
            cell = rf"\| {rate} \| [\d.-]+ \| {memory} \|"
            assert re.search(cell, page), name


@pytest.mark.parametrize(("memory", "keeps"), [(141e9, True), (80e9, False)])
def test_weights_stay_gathered_where_there_is_room(memory: float, keeps: bool) -> None:
    # Kept, 8 rows took 82.3 GiB on two H200s, of 131 there are.
    found = MEASURED["sharded, weights kept"]
    tokens = found["rows"] * found["tokens"]
    for each in (2, 4):
        given = found["parameters"], Division(shard=2), tokens, memory, each
        assert room_to_keep(SIZE, *given) == keeps


def test_the_fastest_comes_first_and_fits() -> None:
    machine = MACHINES["h100"]
    found = best(size_of(7e9), machine, 64, 8192, 4e6)
    seconds = [step.seconds for step in found]
    assert seconds == sorted(seconds)
    assert all(step.memory < machine.memory and step.division.gpus == 64 for step in found)


def test_more_gpus_are_faster_and_a_context_alone_holds_a_long_row() -> None:
    size, machine = size_of(7e9), MACHINES["h200"]
    seconds = [best(size, machine, gpus, 8192, 4e6)[0].seconds for gpus in (8, 64, 512)]
    assert seconds == sorted(seconds, reverse=True)
    assert all(step.division.context > 1 for step in best(size, machine, 64, 2**20, 2**24))


def test_the_figure_is_what_the_plan_says_now(tmp_path: Path) -> None:
    kept = json.loads((FIGURES.parent / "plan.json").read_text())
    assert kept == plan_figure.points(), "python tools/plan_figure.py draws it again"
    plan_figure.draw(kept, tmp_path / "plan.png")
    ours, theirs = (imread(folder / "plan.png") for folder in (tmp_path, FIGURES.parent))
    assert ours.shape == theirs.shape
    # Fonts differ by a shade from machine to machine; a line that has moved does not.
    assert abs(ours - theirs).mean() < 2e-3


def test_the_command_says_what_binds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(PlanRun(parameters=7e9, gpus=8))
    printed = capsys.readouterr().out
    assert "6.96 B parameters: 35 layers of 3840 channels" in printed
    assert "products (" in printed
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    plan(PlanRun(parameters=7e9, gpus=8))
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 60
    assert narrow.split() == printed.split()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 6}, "--gpus must be a power of 2, got 6"),
        ({"parameters": 1e12, "gpus": 2}, "no division of 2 H200s holds 1e\\+12 parameters"),
        ({"parameters": 1e3}, "--parameters must be 1e7 or more"),
    ],
)
def test_what_cannot_be_planned_is_said(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(PlanRun(**options))
