"""`python -m deltarule.tasks`: the table of tasks, and one row of each to read."""

import subprocess
import sys

import pytest

from deltarule.tasks import TASKS, load_task
from deltarule.tasks.__main__ import SIZES, main


def test_the_table_names_modules_and_refuses_others():
    for name in TASKS:
        assert load_task(name).Config()
    with pytest.raises(ValueError, match=r"one of mqar, .*got 'mqra': did you mean 'mqar'\?"):
        load_task("mqra")


def test_the_command_prints_one_example():
    command = [sys.executable, "-W", "error", "-m", "deltarule.tasks", "mqar"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pairs, queries = printed.splitlines()
    assert len(pairs.split()) == 17
    assert queries.count("->") == 8


def test_without_a_name_the_tasks_are_listed(capsys):
    assert SIZES.keys() <= set(TASKS)
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(TASKS)
    assert all(len(line.split()) > 5 for line in lines)
    for name in TASKS:
        main([name])
        assert capsys.readouterr().out.strip()


def test_a_name_that_is_none_is_answered_with_the_nearest(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["party"])
    assert "did you mean 'parity'?" in capsys.readouterr().err
