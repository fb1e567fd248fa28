"""Plain lines and the live bar show the same figures."""

import io

import pytest

from deltarule.train import progress as module
from deltarule.train.extra import MissingExtraError, require
from deltarule.train.progress import LiveProgress, PlainProgress, make_progress


def test_plain_lines_at_the_first_and_last_step_and_when_it_stops_early(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with PlainProgress(100, first=10) as progress:
        for step in range(11, 16):
            now[0] += 4.0
            progress.update(step, {"loss": f"{step}.0"})
        progress.note("a note")
    assert capsys.readouterr().out.splitlines() == [
        "step 11/100  loss 11.0  left 5:56",
        "step 14/100  loss 14.0  left 5:44",
        "a note",
        "step 15/100  loss 15.0  left 5:40",
    ]


def test_the_live_bar_shows_step_figures_and_time(monkeypatch):
    rich = require("rich.console")
    screen = io.StringIO()
    bar = LiveProgress(50)
    bar._bar.live.console = rich.Console(file=screen, force_terminal=True, width=110)
    with bar:
        bar.update(7, {"loss": "1.234", "bits/byte": "1.780"})
        bar.note("said [brackets] above")
    shown = screen.getvalue()
    for part in ("step 7/50", "1.234", "bits/byte", "left", "[brackets]"):
        assert part in shown


def test_no_terminal_means_plain_lines_and_a_missing_package_names_its_extra(capsys):
    assert isinstance(make_progress(5), PlainProgress)
    with pytest.raises(MissingExtraError, match=r"deltarule\[train\]"):
        require("surely_not_installed_at_all")
