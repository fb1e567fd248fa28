"""The command keeps what is finished, goes on after any stop, and says what is in its way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import deltarule
import tiny_cells
from deltarule.cli import FAILED, main
from deltarule.errors import INTERRUPTED
from experiments import experiment, pages, reproduce
from experiments.processes import MachineError, devices_of, least_loaded, own_gpu, run_cells
from experiments.records import RecordError
from experiments.reproduce import ReproduceRun, chosen
from tiny_cells import Tiny

SCRIPT = """
import sys
import tiny_cells
from deltarule.cli import main
from experiments import experiment

experiment.EXPERIMENTS["tiny"] = "tiny_cells"
tiny_cells.CELLS[:] = [tiny_cells.Tiny("slow", waits=True), tiny_cells.Tiny("quick")]
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def cells(monkeypatch, tmp_path):
    """The cells of the experiment `tiny`, to be filled in."""
    monkeypatch.setitem(experiment.EXPERIMENTS, "tiny", "tiny_cells")
    monkeypatch.setattr(tiny_cells, "CELLS", chosen := [Tiny("a"), Tiny("b")])
    monkeypatch.chdir(tmp_path)
    return chosen


def run(**options):
    return reproduce.reproduce(ReproduceRun("tiny", device="cpu", **options))


@pytest.mark.parametrize("workers", [1, 2])
def test_cells_run_and_are_reported(cells, workers, capfd):
    cells += [Tiny("fails"), Tiny("big")]
    folder = run(workers=workers)
    assert folder == Path("runs/reproduce-tiny-laptop")
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    whole = json.loads((folder / "results.json").read_text())
    assert [cell["cell"]["name"] for cell in whole["cells"]] == ["a", "b", "fails", "big"]
    assert whole["cells"][0]["figures"] == {"score": 3.0}
    assert whole["cells"][2]["error"] == "RuntimeError: it was to fail"
    assert whole["command"] == (
        f"deltarule reproduce tiny --scale laptop --workers {workers} --device cpu"
    )
    report = (folder / "report.md").read_text()
    for text in ("A remark.", "`fails`: RuntimeError", "Everything.", "Seeds: 7.", "torch"):
        assert text in report
    printed = capfd.readouterr().out
    assert "[4/4] " in printed
    assert " a: score 3 (" in printed
    assert "FAILED, RuntimeError: it was to fail" in printed


def test_a_second_run_runs_nothing_again_unless_it_is_to_retry(cells):
    cells.append(Tiny("fails"))
    folder = run(workers=1)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("cells/*.json")}
    run(workers=1)
    assert {path: path.stat().st_mtime_ns for path in folder.glob("cells/*.json")} == before
    run(workers=1, retry=True)
    changed = [path.stem for path, then in before.items() if path.stat().st_mtime_ns != then]
    assert changed == ["fails"]


def test_only_some_cells_and_then_the_rest(cells, capsys):
    folder = run(workers=1, only=("b",))
    assert [path.stem for path in folder.glob("cells/*.json")] == ["b"]
    assert not (folder / "report.md").exists()
    run(workers=1)
    assert json.loads((folder / "results.json").read_text())["from_before"] == 1
    # They come in the order of the patterns.
    four = [Tiny(name) for name in ("a-x", "a-y", "b-x", "b-y")]
    assert [c.name for c in chosen(four, ("*-y", "b"))] == ["a-y", "b-y", "b-x"]
    assert chosen(four, ()) == four
    with pytest.raises(ValueError, match="--only b-z: the name of no cell begins so"):
        chosen(four, ("a", "b-z"))


@pytest.mark.parametrize("workers", [1, 2])
def test_after_the_seconds_it_stops_and_the_same_command_goes_on(cells, workers, capsys):
    folder = run(workers=workers, seconds=0.01)
    assert "the 0.01 seconds are over: 0 of 2 cells are finished" in capsys.readouterr().out
    assert not (folder / "results.json").exists()
    run(workers=workers)
    assert len(json.loads((folder / "results.json").read_text())["cells"]) == 2


def test_a_cell_that_dies_leaves_its_last_words_and_the_others_go_on(tmp_path):
    cells = [Tiny(name) for name in ("a", "fails", "dies", "b")]
    records = {}

    def tell(cell, record):
        records[cell.name] = record

    run_cells(cells, tmp_path, [torch.device("cpu")], workers=1, tell=tell)
    # What each prints is its own.
    assert (tmp_path / "cells/dies/log.txt").read_text() == "last words\n"
    assert (tmp_path / "cells/b/log.txt").read_text() == ""
    assert {name: record["error"] for name, record in records.items()} == {
        "a": None, "b": None, "fails": "RuntimeError: it was to fail",
        "dies": "the process ended with code -9: last words",
    }  # fmt: skip


@pytest.mark.parametrize("timed", [False, True])
def test_each_cell_that_takes_times_has_a_process_of_its_own(cells, timed, monkeypatch):
    monkeypatch.setattr(tiny_cells, "TIMED", timed, raising=False)
    folder = run(workers=1, seconds=600)
    steps = [(folder / "cells" / name / "steps").read_text().split() for name in "ab"]
    numbers = {words[1] for words in steps}
    assert str(os.getpid()) not in numbers
    assert len(numbers) == (2 if timed else 1)


def test_a_process_stays_at_its_gpu(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(taken))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: taken[0].index)
    first, second = (torch.device("cuda", index) for index in (1, 0))
    assert own_gpu(first) == own_gpu(second) == first
    assert taken == [first]


def test_what_is_not_a_number_is_no_result(cells):
    cells[:] = [Tiny("nan")]
    folder = run(workers=1)
    error = json.loads((folder / "cells" / "nan.json").read_text())["error"]
    assert error == "there is nan or infinity in what it found: {'score': nan}"
    assert not (folder / "figure.png").exists()
    assert "Failed:" in (folder / "report.md").read_text()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_stops_the_command_and_keeps_what_is_finished(cells, workers):
    cells[:] = [Tiny("a"), Tiny("full-disk"), *(Tiny(f"after-{i}") for i in range(5))]
    with pytest.raises(MachineError, match=r"No space left .* cells are finished, and the same"):
        run(workers=workers)
    finished = [path.stem for path in Path("runs").glob("*/cells/*.json")]
    assert "a" in finished
    assert "full-disk" not in finished
    assert len(finished) < len(cells)
    cells[1] = Tiny("space-again")
    run(workers=1)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_of_another_version_or_configuration_are_refused(cells, workers, monkeypatch):
    def refused(match, error=RecordError):
        with pytest.raises(error, match=match):
            run(workers=workers)

    folder = run(workers=workers)
    cells[0] = Tiny("a", steps=4)
    refused(r"a\.json: .* steps is 3 there and 4 here")
    (folder / "cells" / "a.json").unlink()
    refused(r"cell\.json: .* steps is 3 there and 4 here", ValueError)
    # A field that the file does not know had its default, 3.
    begun = folder / "cells" / "a" / "cell.json"
    record = json.loads(begun.read_text())
    del record["cell"]["steps"]
    begun.write_text(json.dumps(record))
    refused(r"cell\.json: .* steps is 3 there and 4 here", ValueError)
    cells[0] = Tiny("a")
    run(workers=workers)
    with monkeypatch.context() as patch:
        patch.setattr(deltarule, "__version__", "9.9")
        refused(r"written by deltarule 0.*, but this is .* 9\.9")
    path = folder / "cells" / "b.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    refused(r"format 99, written by deltarule 0\.")
    path.write_text("{")
    refused(r"b\.json: damaged")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tiny", "--scale", "gpu", "--device", "cpu"], "needs a CUDA GPU, and --device is cpu"),
        (["memory", "--scale", "gpu"], "memory has no form for --scale gpu, only --scale laptop"),
        (["nothing"], "NAME must be one of"),
        (["tiny", "--device", "cuda:77"], "--device cuda:77"),
    ],
)
def test_what_cannot_be_run_is_said_before_it_starts(cells, words, says, capsys):
    assert main(["reproduce", *words]) == FAILED
    assert says in capsys.readouterr().err
    assert not list(Path("runs").glob("*/cells"))


def test_the_list_says_what_each_shows_and_needs(cells, capsys):
    assert main(["reproduce", "--list"]) == 0
    shown = capsys.readouterr().out
    words = ("A tiny experiment. Nothing.", "From no paper.")
    for text in (*words, "laptop    no time", "gpu       a GPU"):
        assert text in shown
    assert main(["reproduce", "--list", "--scale", "gpu"]) == 0
    assert "memory\n" not in capsys.readouterr().out


def test_published_results_make_a_page_that_keeps_what_was_written_by_hand(cells, tmp_path):
    docs = tmp_path / "docs"
    run(workers=1, publish=docs)
    files = {"tiny-laptop.json", "tiny-laptop.png", "tiny.md"}
    assert {path.name for path in docs.iterdir()} == files
    page = docs / "tiny.md"
    text = page.read_text()
    title, picture = "# A tiny experiment", "tiny-laptop.png"
    for part in (title, "a 3.0", picture, "## The gpu form", "no results"):
        assert part in text
    page.write_text(text.replace("Nothing.", "Written by hand.").replace("a 3.0", "lost"))
    pages.write_page(experiment.load_experiment("tiny"), docs)
    assert page.read_text() == text.replace("Nothing.", "Written by hand.")
    page.write_text("no marks")
    with pytest.raises(ValueError, match=r"tiny\.md lacks"):
        pages.write_page(experiment.load_experiment("tiny"), docs)


@pytest.fixture
def command(tmp_path):
    """The command in a process of its own, with one slow cell and a quick one."""
    script = tmp_path / "command.py"
    script.write_text(SCRIPT)
    paths = [str(Path(tiny_cells.__file__).parent), *sys.path]
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, str(script), "reproduce", "tiny", "--device", "cpu"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def steps_of(folder):
    path = folder / "runs/reproduce-tiny-laptop/cells/slow/steps"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    # A zombie whose parent is gone too is nobody's process.
    return "\nState:\tZ" in Path(f"/proc/{number}/status").read_text()


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes by way of /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_command_leaves_no_process_and_goes_on(tmp_path, command, number):
    process = command()
    quick = tmp_path / "runs/reproduce-tiny-laptop/cells/quick.json"
    wait_for(lambda: len(steps_of(tmp_path)) == 2 and quick.exists())
    worker = int(steps_of(tmp_path)[0].split()[1])
    process.send_signal(number)
    output = process.communicate(timeout=120)[0]
    wait_for(lambda: gone(worker), seconds=10)
    if number != signal.SIGKILL:
        assert process.returncode == INTERRUPTED
        assert "1 of 2 cells are finished; the same command continues" in output
    (tmp_path / "go").touch()
    again = command()
    output = again.communicate(timeout=120)[0]
    assert again.returncode == 0, output
    assert "1 of 2 cells are finished, 1 to run" in output
    assert [line.split()[0] for line in steps_of(tmp_path)] == ["0", "1", "2"]
    assert steps_of(tmp_path)[2].split()[1] != str(worker)


def test_processes_are_spread_over_the_gpus():
    gpus = devices_of(torch.device("cuda"), 3)
    busy = []
    for _ in range(7):
        busy.append(least_loaded(gpus, busy))
    assert [device.index for device in busy] == [0, 1, 2, 0, 1, 2, 0]
    busy.remove(gpus[1])
    assert least_loaded(gpus, busy) == gpus[1]
    assert devices_of(torch.device("cuda", 2), 3) == [gpus[2]]
    assert devices_of(torch.device("cpu"), 0) == [torch.device("cpu")]


def test_a_report_of_finished_cells_needs_no_gpu(cells, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(reproduce, "device_for", lambda *_, **__: torch.device("cpu"))
        folder = run(scale="gpu", workers=1)
    path = folder / "cells" / "a.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"versions": {"torch": "of the other machine"}}))
    again = run(scale="gpu", workers=9)
    whole = json.loads((again / "results.json").read_text())
    assert whole["versions"] == {"torch": "of the other machine"}
    assert (whole["from_before"], whole["workers"]) == (2, 9)
    path.unlink()
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        run(scale="gpu")
    # A form that grows is reported with what there is.
    run(scale="gpu", seconds=0)
    whole = json.loads((again / "results.json").read_text())
    assert [cell["cell"]["name"] for cell in whole["cells"]] == ["b"]
