"""Folders of runs: names, locks, and continuing only what is the same run."""

import dataclasses

import pytest
import torch

from deltarule.parallel import World
from deltarule.train.checkpoint import Checkpoints
from deltarule.train.loop import LoopOptions
from deltarule.train.metrics import Metrics
from deltarule.train.run_folder import (
    DataFacts,
    RunFolderError,
    StoppedRunError,
    folder_to_resume,
    locked,
    new_folder,
    open_run,
    read_run,
    stored_configuration,
    write_run,
)
from deltarule.train.runs import RunsRun, load_model, show_runs
from deltarule.train.text import ModelOptions, TextRun

DATA, ALONE = DataFacts("x", 10, "0"), World(torch.device("cpu"))


def start(run, data=DATA):
    with open_run(run, "train text", "text", ALONE, data) as folder:
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


def test_a_configuration_survives_its_json(tmp_path, monkeypatch):
    model = ModelOptions(layer_types=("kda", "attention"), head_k_dim=8, mlp_size=None)
    loop = LoopOptions(max_seconds=1.5, dtype="bfloat16")
    run = TextRun(data="/x.txt", runs=tmp_path, model=model, loop=loop)
    folder = start(run)
    assert stored_configuration(folder, TextRun, "train text") == run
    content = read_run(folder)
    assert content.data == DATA
    assert {"deltarule", "torch", "python", "threads", "device"} <= content.machine.keys()
    # Paths mean the same from any folder.
    monkeypatch.chdir(tmp_path)
    stored = stored_configuration(start(TextRun(data="some/text.txt")), TextRun, "train text")
    assert (stored.data, stored.runs) == (str(tmp_path / "some/text.txt"), tmp_path / "runs")


def test_resume_needs_the_same_options_but_for_where_it_stops(tmp_path):
    run = TextRun(runs=tmp_path, name="a")
    start(run)
    free = dataclasses.replace(run.loop, max_seconds=9.0, keep=7, save_every=3)
    assert start(dataclasses.replace(run, resume=True, loop=free)) == tmp_path / "a"
    other = dataclasses.replace(run.loop, seed=1)
    with pytest.raises(RunFolderError, match=r"--seed is 1, but .* was started with 0"):
        start(dataclasses.replace(run, resume=True, loop=other))
    with pytest.raises(RunFolderError, match="other data"):
        start(dataclasses.replace(run, resume=True), DataFacts("x", 10, "1"))


def test_two_processes_cannot_write_one_run(tmp_path):
    pytest.importorskip("fcntl")
    with locked(tmp_path), pytest.raises(RunFolderError, match="in use"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_who_only_looks_at_runs_writes_nothing(tmp_path, capsys):
    folder = start(TextRun(runs=tmp_path, name="mine"))
    show_runs(RunsRun(runs=tmp_path))
    with locked(folder):
        show_runs(RunsRun(runs=tmp_path))
    told = capsys.readouterr().out.split()
    assert [word for word in told if word in ("stopped", "running")] == ["stopped", "running"]
    (folder / ".lock").unlink()
    show_runs(RunsRun(runs=tmp_path))
    assert [path.name for path in folder.iterdir()] == ["run.json"]


def test_a_start_that_fails_changes_no_run(tmp_path):
    run = TextRun(runs=tmp_path, name="a", loop=LoopOptions(steps=10))
    folder = start(run)
    before = (folder / "run.json").read_text()
    with Metrics(folder / "metrics.jsonl", after=0) as metrics:
        metrics.write({"step": 5})
    more = dataclasses.replace(run, resume=True, loop=LoopOptions(steps=20))

    def fail(trains=False):
        with open_run(more, "train text", "text", ALONE, DATA):
            if trains:
                Metrics(folder / "metrics.jsonl", after=5).__exit__()
            raise ValueError("does not fit")

    with pytest.raises(ValueError, match="does not fit"):
        fail()
    assert (folder / "run.json").read_text() == before
    # What follows is of the longer run, also if it takes no step.
    with pytest.raises(ValueError, match="does not fit"):
        fail(trains=True)
    assert stored_configuration(folder, TextRun, "train text").loop.steps == 20


def test_steps_may_grow_and_harmless_options_change(tmp_path, capsys):
    run = TextRun(runs=tmp_path, name="a", loop=LoopOptions(steps=10))
    folder = start(run)
    Checkpoints(folder / "checkpoints").save(8, {}, {})
    longer = dataclasses.replace(run.loop, steps=20, device="cpu")
    more = dataclasses.replace(run, resume=True, sample_bytes=7, loop=longer)
    assert start(more) == folder
    assert "steps 10 -> 20" in capsys.readouterr().out
    stored = stored_configuration(folder, TextRun, "train text")
    assert stored.loop.steps == 20
    assert stored.sample_bytes == 7
    assert read_run(folder).resumed[0].step == 8
    with pytest.raises(RunFolderError, match=r"--steps 7: .* has taken 8 steps already"):
        start(dataclasses.replace(more, loop=dataclasses.replace(run.loop, steps=7)))


def test_another_machine_is_said_in_one_line_and_recorded(tmp_path, capsys):
    run = TextRun(runs=tmp_path, name="a")
    folder = start(run)
    before = read_run(folder)
    machine = before.machine | {"threads": "64", "torch": "2.4.0"}
    write_run(folder, dataclasses.replace(before, machine=machine))
    again = dataclasses.replace(run, resume=True)
    start(again)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "torch 2.4.0 -> " in said
    assert "threads 64 -> " in said
    assert read_run(folder).resumed[-1].changed["threads"].startswith("64 -> ")
    start(again)
    assert capsys.readouterr().out == ""


def test_checkpoints_without_their_run_json_are_not_taken_for_a_new_run(tmp_path):
    checkpoints = Checkpoints(tmp_path / "mine" / "checkpoints", keep=1)
    checkpoints.save(7, {}, {})
    with pytest.raises(RunFolderError, match=r"holds checkpoints.* step 7, and no run\.json"):
        start(TextRun(runs=tmp_path, name="mine"))
    assert checkpoints.steps() == [7]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_stops_a_run_from_outside_names_its_folder(tmp_path, error):
    with (
        pytest.raises(StoppedRunError, match=str(tmp_path / "text")) as caught,
        open_run(TextRun(runs=tmp_path), "train text", "text", ALONE),
    ):
        raise error
    assert caught.value.folder == tmp_path / "text"
    assert caught.value.code == (130 if isinstance(error, KeyboardInterrupt) else 1)


def test_load_model_says_what_a_folder_without_a_model_is(tmp_path):
    with pytest.raises(ValueError, match="there is no such run"):
        load_model(tmp_path / "nothing", "cpu")
    with pytest.raises(ValueError, match=r"not the folder of a run, it holds no run\.json$"):
        load_model(tmp_path, "cpu")
    folder = start(TextRun(runs=tmp_path))
    with pytest.raises(ValueError, match=r"no run\.json; there are runs in it, such as text$"):
        load_model(tmp_path, "cpu")
    with pytest.raises(ValueError, match="no checkpoint yet"):
        load_model(folder, "cpu")
