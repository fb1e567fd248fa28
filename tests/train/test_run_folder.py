"""Folders of runs: names, locks, and continuing only what is the same run."""

import dataclasses
import json

import pytest

from deltarule.train.loop import LoopOptions
from deltarule.train.run_folder import (
    RunFolderError,
    folder_to_resume,
    from_plain,
    load_model,
    locked,
    new_folder,
    open_run,
    read_run,
    stored_configuration,
)
from deltarule.train.text import TextModel, TextRun

FACTS = {"data": {"sha256": "0"}}


def start(run):
    with open_run(run, "train text", "text", FACTS) as folder:
        return folder


def test_unnamed_runs_are_numbered_and_resume_takes_the_newest(tmp_path):
    run = TextRun(runs=tmp_path)
    assert [start(run).name for _ in range(3)] == ["text", "text-2", "text-3"]
    assert folder_to_resume(tmp_path, None, "train text").name == "text-3"
    assert folder_to_resume(tmp_path, "text", "train text").name == "text"
    with pytest.raises(RunFolderError, match="train mqar"):
        folder_to_resume(tmp_path, None, "train mqar")


def test_a_taken_name_is_refused_and_so_is_resuming_nothing(tmp_path):
    start(TextRun(runs=tmp_path, name="mine"))
    with pytest.raises(RunFolderError, match="--resume"):
        start(TextRun(runs=tmp_path, name="mine"))
    with pytest.raises(RunFolderError, match="no run"):
        start(TextRun(runs=tmp_path, name="yours", resume=True))
    with pytest.raises(RunFolderError, match="no run"):
        start(TextRun(runs=tmp_path / "nowhere", resume=True))


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".."])
def test_a_name_cannot_leave_the_folder_of_runs(tmp_path, name):
    for choose in (new_folder, folder_to_resume):
        with pytest.raises(RunFolderError, match="plain name"):
            choose(tmp_path, name, "text")


def test_a_configuration_survives_its_json(tmp_path):
    run = TextRun(
        data="x.txt",
        runs=tmp_path,
        model=TextModel(layer_types=("kda", "attention"), head_k_dim=8),
        loop=LoopOptions(max_seconds=1.5, dtype="bfloat16"),
    )
    folder = start(run)
    assert stored_configuration(folder, TextRun, "train text") == run
    content = read_run(folder)
    assert content["data"] == FACTS["data"]
    assert {"deltarule", "torch", "python"} == content["versions"].keys()


def test_resume_needs_the_same_options_but_for_where_it_stops(tmp_path):
    run = TextRun(runs=tmp_path, name="a")
    start(run)
    free = dataclasses.replace(run.loop, max_seconds=9.0, keep=7, save_every=3)
    assert start(dataclasses.replace(run, resume=True, loop=free)) == tmp_path / "a"
    other = dataclasses.replace(run.loop, seed=1)
    with pytest.raises(RunFolderError, match=r"--seed is 1, but .* was started with 0"):
        start(dataclasses.replace(run, resume=True, loop=other))
    with (
        pytest.raises(RunFolderError, match="other data"),
        open_run(dataclasses.replace(run, resume=True), "train text", "text", {"data": {}}),
    ):
        pass


def test_two_processes_cannot_write_one_run(tmp_path):
    pytest.importorskip("fcntl")
    with locked(tmp_path), pytest.raises(RunFolderError, match="in use"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("content", ["", "[]", '{"command": "train mqar"}', '{"command": 1'])
def test_a_run_json_of_something_else_is_named(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunFolderError, match=r"run\.json|train mqar"):
        stored_configuration(tmp_path, TextRun, "train text")


def test_unknown_fields_of_a_newer_version_are_refused(tmp_path):
    folder = start(TextRun(runs=tmp_path))
    content = read_run(folder)
    content["configuration"]["flux"] = 1
    (folder / "run.json").write_text(json.dumps(content))
    with pytest.raises(RunFolderError, match="flux"):
        stored_configuration(folder, TextRun, "train text")


def test_from_plain_keeps_none_and_makes_tuples():
    model = from_plain(TextModel, {"layer_types": ["gla"], "mlp_size": None})
    assert model == TextModel(layer_types=("gla",), mlp_size=None)


def test_load_model_says_what_a_folder_without_a_model_is(tmp_path):
    with pytest.raises(ValueError, match=r"holds no finished model.*--resume"):
        load_model(tmp_path, "cpu")
    with pytest.raises(ValueError, match="there is no such run"):
        load_model(tmp_path / "nothing", "cpu")
