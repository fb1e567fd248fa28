"""The command line as a user meets it: help, suggestions, one-line errors, exit codes, signals."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltarule.cli import COMMANDS, FAILED, MISUSED, Command, main
from deltarule.config_file import completed, flat, to_toml
from deltarule.errors import INTERRUPTED
from deltarule.models import CausalLM
from deltarule.nn import SYSTEMS
from deltarule.train.checkpoint import Checkpoints
from deltarule.train.run_folder import locked, read_run, stored_configuration
from deltarule.train.text import ModelOptions, TextRun
from small import FLAGS, small_model

TRAIN = ["train", "text", "--data", "data.txt", *FLAGS]
COMMAND = [sys.executable, "-m", "deltarule", *TRAIN]
LONG = [*COMMAND, "--steps", "100000", "--save-every", "100000"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a text in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.txt").write_text("the cat sat on the mat and so on\n" * 100)
    return tmp_path


def code_of(words):
    """The parser of flags leaves by itself."""
    try:
        return main(words)
    except SystemExit as left:
        return left.code


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    assert main([]) == MISUSED
    assert main(["--version"]) == 0
    assert "torch" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_its_flags(name, capsys):
    assert code_of([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert "usage: deltarule " + name in shown
    assert "(default:" in shown


# What a user may type that cannot be done, and what the one line says.
FAILS = [
    (["train", "text", "--data", "/no/such/file"], "--data /no/such/file"),
    (["train", "text", "/no/such/file"], "--data /no/such/file"),
    (["train", "text", "--data", ""], "--data : there is no such file"),
    (["train", "text", "--runs", __file__], "test_cli.py/text: Not a directory\n"),
    (["train", "text", "--layer-types", "gated_deltane"], "did you mean 'gated_deltanet'"),
    (["train", "text", "--layer-types", "kda,attention"], "give each name apart"),
    (["train", "mqar", "--layer-types", "lstm"], "lstm"),
    (["train", "text", "--device", "cuda:77"], "--device cuda:77"),
    (["generate", "/no/such/run"], "/no/such/run"),
    (["generate", "/"], "/: not the folder of a run, it holds no run.json"),
    (["train", "text", "--config-file"], "--config-file needs the path of a TOML file"),
    (["train", "text", "--tokenizer", "/no/tool"], "--tokenizer /no/tool: no such folder"),
    (["eval", "/no/such/run"], "/no/such/run"),
    (["rules", "--name", "kdaa"], "did you mean 'kda'"),
    (["explain", "--v-heads", "3"], "v must have a multiple"),
    (["rules", "kdaa"], "there is no rule 'kdaa'; did you mean 'kda'"),
    (["runs", "nothing"], "runs/nothing: there is no such run\n"),
    (["generate", __file__], "test_cli.py: a file; give the folder of a run"),
    (["generate", "a", "two", "words"], "'words' is one word too many after 'two', the prompt"),
    (["generate", "a", "x", "--prompt", "y"], "'x' is read as --prompt, which is given too"),
    (["train", "text", "--data=a", "b"], "'b' is read as --data, which is given too"),
    (["convert", "a", "b", "--shard-gb", "0"], "--shard-gb must be above 0, got 0.0"),
    (["train", "text", "--steps", "9" * 30], "--steps must be a number below 2^63"),
    (["plan", "--parameters", "inf"], "--parameters must be a number below 2^63"),
    (["train", "text", "--device", "meta"], "--device meta"),
    (["train", "text", "--name", "../up"], "plain name"),
    (["warmup", "--config", __file__], "test_cli.py: not JSON: "),
    (["warmup", "--config", "/no/such"], "/no/such: cannot be read: No such file"),
    (["convert", __file__, "b"], "test_cli.py: a file; give its folder"),
]
# What is no command, no flag, no number, or one out of range.
MISUSES = [
    ("trian", "train"), ("train txt", "train text"), ("zz", "eval"),
    ("plot", "known: plot attention\n"), ("plot attentions X", "did you mean 'plot attention'?"),
    ("train text --lr x", "Error parsing --lr: "), ("train text --batch-token 3", "Perhaps you"),
    ("train text --window x", "- None: ['x'] does not match"),
    ("train text --lr -1", "deltarule: error: lr must be 0 or more, got -1.0\n"),
    ("generate a --samples 0", "deltarule: error: samples must be 1 or more, got 0\n"),
    ("explain --tokens 0", "deltarule: error: tokens must be 1 or more, got 0\n"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), FAILS)
def test_what_cannot_be_done_is_one_readable_line(words, says, capsys, folder):
    if words[:2] == ["train", "text"] and not any("data" in w or "file" in w for w in words):
        words = [*words, "--data", "data.txt"]
    assert main(words) == FAILED
    error = capsys.readouterr().err
    assert error.startswith("deltarule: error: ")
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("words", "says"), MISUSES)
def test_what_is_misused_is_answered_without_the_name_of_a_class(words, says, capsys):
    assert code_of(words.split()) == MISUSED
    error = capsys.readouterr().err
    assert says in error
    assert "got" not in says or error == says


def test_rules_prints_the_table_and_one_rule(capsys):
    assert main(["rules"]) == 0
    shown = capsys.readouterr().out
    for system in SYSTEMS.values():
        for column in (system.name, system.recurrence, system.read_out, system.objective):
            assert column in shown, system.name
    assert main(["rules", "--name", "mamba2"]) == 0
    capsys.readouterr()
    assert main(["rules", "kda"]) == 0
    shown = capsys.readouterr().out
    assert SYSTEMS["kda"].recurrence in shown
    assert SYSTEMS["mamba2"].recurrence not in shown
    assert "- checkpoints: kda, kimi_linear\n" in shown


def test_a_toml_file_holds_flags_and_those_given_beside_it_count(folder):
    options = flat(dataclasses.asdict(TextRun(data="data.txt", model=ModelOptions(num_heads=1))))
    options |= {"steps": 9, "hidden_size": 16, "layer_types": ["kda"], "mlp_size": 16}
    options |= {"sample_bytes": 0, "runs": "runs", "cuda_graphs": False}
    Path("all.toml").write_text(to_toml(options).replace("\nsteps", "\n[loop]\nsteps"))
    words = ["train", "text", "--config-file", "all.toml", "--steps", "1", "--name", "a"]
    assert main(words) == 0
    stored = stored_configuration(Path("runs/a"), TextRun, "train text")
    assert (stored.loop.steps, stored.model.layer_types) == (1, ("kda",))
    assert not stored.loop.cuda_graphs
    Path("few.toml").write_text("max-new-tokens = 3\nseed = 1\ntop_k = 2\n")
    assert main(["generate", "runs/a", "ab", "--config-file=few.toml"]) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"), ("stepz = 1", "no flag 'stepz'; did you mean 'steps'?"),
        ("steps = ", "Invalid value"), (b"\xff", "not UTF-8"),
    ],
)  # fmt: skip
def test_a_config_file_that_is_none_is_one_line(text, says, tmp_path, capsys):
    path = tmp_path / "x.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["train", "text", "--config-file", str(path)]) == FAILED
    error = capsys.readouterr().err
    assert says in error
    assert str(path) in error
    assert error.count("\n") == 1


@dataclasses.dataclass
class Nothing:
    """The flags of a command that fails."""


def fail(run: Nothing):
    raise KeyError("a\nb")


def test_an_error_that_nobody_foresaw_is_one_line_too(monkeypatch, capsys):
    monkeypatch.setitem(COMMANDS, "rules", Command(f"{__name__}:fail", "fail"))
    assert main(["rules"]) == FAILED
    assert capsys.readouterr().err.startswith("deltarule: error: KeyError: ")
    with pytest.raises(KeyError):
        main(["rules", "--traceback"])
    with pytest.raises(ValueError, match="no such file"):
        main(["train", "text", "--data", "/no/such/file", "--traceback"])


@pytest.mark.parametrize(
    "flags", [[], ["--operator", "dplr"], ["--no-erase", "--decay", "channel"]]
)
def test_explain_names_the_implementation_that_runs(flags, capsys):
    assert main(["explain", "--tokens", "8", *flags]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("runs ") for line in shown) == 1
    assert any("reference" in line for line in shown)


@pytest.mark.parametrize(
    "words",
    [
        ["data.txt", "--layer-types", "kda", "attention"],
        ["data.txt", "--activation-checkpointing", "--layer-types", "kda", "attention"],
        ["--activation-checkpointing", "data.txt", "--layer-types", "kda", "attention"],
        ["--num-layers", "2", "data.txt", "--layer-types", "kda", "attention"],
    ],
)
def test_flags_of_several_words_and_of_none_stand_beside_bare_words(words):
    assert completed(TextRun, "data", words)[-1] == "--data=data.txt"
    flags = [word for word in words if word != "data.txt"]
    assert completed(TextRun, "data", flags) == flags


def test_bare_words_may_stand_between_flags(folder, capsys):
    train = ["train", "text", *FLAGS, "--steps", "1", "data.txt"]
    assert main([*train, "--name", "a"]) == 0
    assert read_run(Path("runs/a")).configuration["data"] == str(folder / "data.txt")
    shutil.copy("data.txt", "other.txt")
    capsys.readouterr()
    assert main(["eval", "--length", "8", "runs/a", "other.txt"]) == 0
    assert "runs/a on other.txt, other data" in capsys.readouterr().out
    generate = ["generate", "--max-new-tokens", "2"]
    for words in (["runs/a", "the"], ["--seed", "1", "runs/a", "--top-k", "9", "the"]):
        capsys.readouterr()
        assert main([*generate, *words]) == 0
        assert capsys.readouterr().out.startswith("the")
    assert main([*generate, "runs/a", "the", "--max-new-tokens", "-1", "--samples", "2"]) == FAILED
    assert capsys.readouterr().out == ""
    assert main(["train", "text", "--resume", "--lr", "0.5"]) == FAILED
    assert "--lr is 0.5" in capsys.readouterr().err
    assert code_of([*generate, "runs/a", "--stop", "b", "c", "--lines", "- x"]) == MISUSED
    assert "lines needs prompt_file" in capsys.readouterr().err
    assert code_of(["generate", "runs/a", "--sede", "1", "the"]) == MISUSED
    assert "--sede" in capsys.readouterr().err
    assert main(["runs", "--toml", "a"]) == 0
    assert "steps = 1" in capsys.readouterr().out
    assert main(["generate", "a", "the"]) == FAILED
    assert "a: there is no such run; the newest there are: runs/a\n" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--num-heads", "3"], ["--log", "wandb"]])
def test_a_run_that_fails_before_its_first_step_keeps_no_name(wrong, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    train = [*TRAIN, "--steps", "1", "--name", "a", "--layer-types", "attention"]
    kept = Path("runs/a")
    assert main([*train, *wrong]) == FAILED
    assert not kept.exists()
    kept.mkdir()
    (kept / "mine").touch()
    assert main([*train, *wrong]) == FAILED
    assert [path.name for path in kept.iterdir()] == ["mine"]
    assert main(train) == 0
    assert main([*train, "--resume", *wrong]) == FAILED
    assert (kept / "run.json").exists()


def test_a_run_that_fails_in_its_first_step_keeps_no_name(folder, monkeypatch):
    def fails(*_):
        raise ValueError("the rows are too short")

    monkeypatch.setattr("deltarule.train.text.TextJob.loss", fails)
    assert main([*TRAIN, "--steps", "1", "--name", "a"]) == FAILED
    assert [*Path("runs").iterdir()] == []


def test_a_run_that_was_copied_goes_on_where_it_is(folder, capsys, monkeypatch):
    assert main([*TRAIN, "--steps", "2", "--name", "a"]) == 0
    shutil.copytree("runs", "other/runs")
    before = Path("runs/a/run.json").read_bytes()
    monkeypatch.chdir("other")
    resume = ["train", "text", "--resume", "--name", "a"]
    assert main(resume) == 0
    assert "runs/a has taken all of its 2 steps" in capsys.readouterr().out
    assert main([*resume, "--steps", "3"]) == 0
    assert read_run(Path("runs/a")).done == 3
    assert (folder / "runs/a/run.json").read_bytes() == before


def test_runs_are_listed_compared_and_written_as_flags(folder, capsys, monkeypatch):
    assert main(["runs"]) == FAILED
    assert "there are no runs" in capsys.readouterr().err
    a, b, c = (Path("runs") / name for name in "abc")
    train = [*TRAIN, "--steps", "4"]
    assert main([*train, "--name", "a", "--evaluate-every", "2"]) == 0
    assert main([*train, "--name", "b", "--lr", "0.5", "--max-seconds", "0"]) == 0
    (b / "model.safetensors").unlink()
    capsys.readouterr()
    assert main(["runs"]) == 0
    head, of_a, of_b = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "of", "step", "state", "last", "validation"]
    assert of_a.split()[:5] == ["a", "train", "text", "4/4", "done"]
    assert "bits_per_byte" in of_a
    assert of_b.split()[:4] == ["b", "train", "text", "1/4"]
    with monkeypatch.context() as terminal:
        terminal.setenv("COLUMNS", "60")
        terminal.setattr(sys.stdout, "isatty", lambda: True)
        assert main(["runs"]) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 60
    assert narrow.split() == " ".join([head, of_a, of_b]).split()
    with locked(a):
        assert main(["runs", "a"]) == 0
    assert "running" in capsys.readouterr().out
    assert main(["train", "text", "--resume", "--name", "a"]) == 0
    capsys.readouterr()
    assert main(["runs", "a", "b"]) == 0
    shown = capsys.readouterr().out
    assert "timeout-s" not in shown
    assert "lr" in shown
    assert "0.003  0.5" in shown
    assert "hidden-size" not in shown
    assert main(["runs", "b", "--toml"]) == 0
    Path("b.toml").write_text(capsys.readouterr().out)
    assert main(["train", "text", "--config-file", "b.toml", "--name", "c"]) == 0
    first, again = (read_run(folder).configuration for folder in (b, c))
    assert first | {"name": "c"} == again
    assert main(["runs", "a", "nothing"]) == FAILED
    damaged = json.loads((c / "run.json").read_text())
    damaged["configuration"]["loop"]["steps"] = "many"
    (c / "run.json").write_text(json.dumps(damaged))
    with (a / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "validation_accuracy": "x"}\n')
    capsys.readouterr()
    assert main(["runs", "runs/c"]) == FAILED
    says = "runs/c/run.json: steps: expected an integer, got str 'many'\n"
    assert capsys.readouterr().err == f"deltarule: error: {says}"
    assert main(["runs"]) == 0
    note, _, *rows = capsys.readouterr().out.splitlines()
    assert note == f"note: {says.strip()}"
    assert [row.split()[0] for row in rows] == ["b", "a"]
    assert "bits_per_byte" in rows[1]


def test_the_hint_of_a_run_whose_time_is_over_is_a_whole_command(folder, capsys):
    words = [*TRAIN, "--steps", "3", "--runs", "here"]
    assert main([*words, "--max-seconds", "0"]) == 0
    *_, says, hint = capsys.readouterr().out.splitlines()
    assert says == "continue it with:"
    assert hint.split()[0] == "deltarule"
    assert main(hint.split()[1:]) == 0
    assert "step 3/3" in capsys.readouterr().out
    assert main([*words, "--name", "text"]) == FAILED
    error = capsys.readouterr().err
    assert "deltarule train text --resume --name text --runs here" in error


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_a_terminal_of_60_columns_is_readable_from_a_process(term, folder):
    """No line of a run is longer, and a dumb terminal is sent no control characters."""
    pty = pytest.importorskip("pty")
    pid, screen = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": term, "COLUMNS": "60", "NO_COLOR": "1"}
        os.execv(sys.executable, [*COMMAND, "--steps", "40"])
    seen = b""
    with contextlib.suppress(OSError):
        while part := os.read(screen, 65536):
            seen += part
    os.waitpid(pid, 0)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode()).replace("\r", "\n")
    run = [line for line in text.splitlines() if re.match(r"step|run |model ", line.strip())]
    assert run
    assert max(map(len, run)) <= 60
    assert term != "dumb" or b"\x1b" not in seen


def has_begun():
    """Whether the run has done a step, for which a minute is enough."""
    metrics, until = Path("runs/text/metrics.jsonl"), time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size):
        yield time.monotonic() < until


def test_ctrl_c_saves_says_how_to_resume_and_resuming_works(folder):
    process = subprocess.Popen(LONG, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for in_time in has_begun():
        assert in_time
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, error
    assert "--resume --name text" in error
    assert "Traceback" not in error
    checkpoints = Checkpoints(Path("runs/text/checkpoints"))
    assert checkpoints.newest().step == checkpoints.steps()[-1] > 0


def with_torch(folder, text, environment):
    """A command's process that finds this module in place of PyTorch."""
    (folder / "torch.py").write_text(text)
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [sys.executable, "-m", "deltarule", "rules"]
    return subprocess.run(command, env=environment | paths, capture_output=True, text=True)


def test_ctrl_c_during_imports_is_one_line_in_a_process(tmp_path):
    """A module that presses the keys, and loses what they raise as C does."""
    pressed = "import os\ntry:\n    os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt:\n    pass\n"
    done = with_torch(tmp_path, pressed, dict(os.environ))
    assert (done.returncode, done.stderr) == (INTERRUPTED, "deltarule: stopped\n")


@pytest.mark.parametrize(
    ("given", "turns"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_that_wait_sleep_early_unless_the_user_says_otherwise(tmp_path, given, turns):
    """PyTorch reads it as it is imported; the module prints it."""
    kept = {n: x for n, x in os.environ.items() if n not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    prints = "import os; print(os.environ.get('GOMP_SPINCOUNT')); exit()"
    assert with_torch(tmp_path, prints, kept | given).stdout == f"{turns}\n"


@pytest.mark.parametrize("name", ["model.safetensors", "metrics.jsonl"])
def test_a_full_disk_is_one_line_and_the_line_that_resumes_the_process(name, folder):
    """A limit on the length of files stands for it, below or above what a checkpoint takes."""
    pytest.importorskip("resource")
    most = 10_000 if name == "model.safetensors" else 60_000
    limited = (
        "import resource, sys; from deltarule.cli import main; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most})); sys.exit(main())"
    )
    words = [*TRAIN, "--steps", "100000"]
    words += ["--save-every", "5" if name == "model.safetensors" else "100000"]
    done = subprocess.run(
        [sys.executable, "-c", limited, *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == FAILED
    first, second = done.stderr.splitlines()
    assert first.startswith("deltarule: error: runs/text has stopped: ")
    assert "File too large" in first
    assert first.endswith("; continue with:")
    assert second.strip().endswith("--resume --name text")
    assert not list(Path("runs/text/checkpoints").iterdir())


def test_a_lost_terminal_saves_like_ctrl_c_in_a_process(folder):
    """The run writes to a pseudo-terminal, whose other end is closed: a hangup."""
    pty = pytest.importorskip("pty")
    pid, screen = pty.fork()
    if pid == 0:
        # Tests that run under nohup would hand on that a hangup is nothing.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(sys.executable, LONG)
    for in_time in has_begun():
        assert in_time
        os.read(screen, 65536)
    os.close(screen)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == INTERRUPTED
    assert Checkpoints(Path("runs/text/checkpoints")).newest().step > 0


def test_a_reader_that_leaves_early_is_no_error(folder):
    main([*TRAIN, "--steps", "1", "--name", "a"])
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "deltarule", "generate", "runs/a"],
        stdout=writer, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(writer)
    os.close(reader)
    _, error = process.communicate(timeout=60)
    assert "Traceback" not in error
    assert "Exception ignored" not in error


def test_convert_writes_another_layout_and_says_so(tmp_path, capsys):
    small_model("kda", mlp_size=16).save(tmp_path / "own")
    words = ["convert", str(tmp_path / "own"), str(tmp_path / "kda"), "--to", "kda"]
    assert main(words) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'kda'}: written as kda\n"
    assert CausalLM.load(tmp_path / "kda").config.layer_types == ("kda",)
    assert main(words) == FAILED
    assert "exists already" in capsys.readouterr().err


def test_convert_of_a_run_that_goes_on_says_how_to_finish_it(folder, capsys):
    main([*TRAIN, "--steps", "1"])
    capsys.readouterr()
    Path("runs/text/model.safetensors").unlink()
    assert main(["convert", "runs/text", "kda"]) == FAILED
    assert "finish it with: deltarule train text --resume --name text" in capsys.readouterr().err
    assert main(["convert", "runs/text/checkpoints/step-1", "kda"]) == FAILED
    assert "is a checkpoint within a run" in capsys.readouterr().err
