"""The whole of `deltarule train text` on a small text, resumed, generated from and evaluated."""

import dataclasses
import io
import itertools
import json
import re
import shutil
import sys
import time

import pytest
import torch

from deltarule.cli import FAILED, main
from deltarule.models import CausalLM
from deltarule.models.convert.copy import convert
from deltarule.models.files import INDEX
from deltarule.train.documents import DataError
from deltarule.train.loop import LoopOptions
from deltarule.train.metrics import read_metrics
from deltarule.train.optimizer import OptimizerOptions
from deltarule.train.report import EvalRun, evaluate_run
from deltarule.train.run_folder import RunFolderError, check_data
from deltarule.train.runs import load_model
from deltarule.train.sample import GenerateRun, generate_text
from deltarule.train.text import TextRun, train_text
from small import crash_at, small_run

LINES = [f"{i} bottles of beer on the wall, {i} bottles of beer.\n" for i in range(99, 20, -1)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "data").mkdir()
    for i in range(12):
        (folder / "data" / f"{i}.txt").write_text("".join(LINES[i::3]))
    return small_run(
        folder / "data", folder / "runs", long_length=128, sample_bytes=20, sample_prompt="9",
        validation_bytes=1500, optimizer=OptimizerOptions(lr=1e-2, warmup_steps=5),
        loop=LoopOptions(steps=60, save_every=30, evaluate_every=30),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(run):
    return train_text(run)


def test_the_folder_holds_all_that_was_promised_and_what_was_learned(folder):
    for name in ("model.safetensors", "config.json", "run.json", "metrics.jsonl"):
        assert (folder / name).stat().st_size > 0
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "checkpoints" / "step-60" / "COMPLETE").is_file()
    assert json.loads((folder / "run.json").read_text())["configuration"]["length"] == 32
    last = read_metrics(folder / "metrics.jsonl")[-1]
    assert last["final_length_32_bits_per_byte"] < 4.0
    assert last["final_length_128_bits_per_byte"] < 4.0
    assert 0 < last["final_gzip_bits_per_byte"] < 8
    assert 0 < last["final_xz_bits_per_byte"] < 8


def test_the_saved_model_is_the_trained_one(folder, run):
    straight = [(folder / name).read_bytes() for name in ("model.safetensors", "metrics.jsonl")]
    assert train_text(dataclasses.replace(run, name=folder.name, resume=True)) == folder
    again = [(folder / name).read_bytes() for name in ("model.safetensors", "metrics.jsonl")]
    assert again == straight


def test_a_model_in_several_files_is_read_as_in_one(folder, tmp_path):
    convert(folder, tmp_path / "several", shard_size=5000)
    assert (tmp_path / "several" / INDEX).exists()
    several, one = (load_model(x, "cpu").state_dict() for x in (tmp_path / "several", folder))
    assert all(torch.equal(several[name], x) for name, x in one.items())


def test_a_run_after_resume_is_told_how_it_goes_on(folder, capsys):
    for word in (str(folder), folder.name):
        assert main(["train", "text", "--resume", word, "--runs", str(folder.parent)]) == FAILED
        says = f"--resume {word}: a run is not data; continue it with: deltarule train text"
        assert f"{says} --resume --name {folder.name}\n" in capsys.readouterr().err


def test_data_may_have_the_name_of_a_run(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_data(f"{folder.name}.txt", folder.parent, "train text")
    (tmp_path / folder.name).mkdir()
    check_data(folder.name, folder.parent, "train text")


def test_generate_takes_prompts_from_anywhere(folder, tmp_path, capsys, monkeypatch):
    options = {"max_new_tokens": 6, "temperature": 0.0}

    def written(**more):
        capsys.readouterr()
        generate_text(GenerateRun(folder, **options | more))
        return capsys.readouterr().out

    one, two = written(prompt="99 b"), written(prompt="on")
    assert one.startswith("99 b")
    assert len(one) > 8
    file = tmp_path / "prompts.txt"
    file.write_text("99 b\non\n")
    assert written(prompt_file=str(file), lines=True) == f"--- 1\n{one}--- 2\n{two}"
    file.write_text("99 b")
    assert written(prompt_file=str(file)) == one
    assert written(prompt="on", samples=2) == f"--- 1\n{two}--- 2\n{two}"
    monkeypatch.setattr("sys.stdin", io.StringIO("99 b\non\n"))
    assert written(interactive=True) == one[4:] + two[2:]
    with pytest.raises(ValueError, match=r"--prompt-file .*No such file"):
        written(prompt_file=str(tmp_path / "missing"))
    for wrong in ({"prompt": "a", "interactive": True}, {"lines": True}, {"samples": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            GenerateRun(folder, **wrong)


def test_a_terminal_is_shown_control_characters_and_obeys_none(folder, capsys, monkeypatch):
    written = "a\n\x1b]0;b\x07\x9b"
    monkeypatch.setattr("deltarule.train.sample.sample_text", lambda *_: iter(written))
    generate_text(GenerateRun(folder, "\x1b[2J\t"))
    assert capsys.readouterr().out == f"\x1b[2J\t{written}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    generate_text(GenerateRun(folder, "\x1b[2J\t"))
    assert capsys.readouterr().out == r"\x1b[2J" + "\ta\n" + r"\x1b]0;b\x07\x9b" + "\n"


def test_a_text_ends_after_a_stop_word_however_its_tokens_fall(folder, capsys):
    options = {"prompt": "9", "max_new_tokens": 60, "seed": 3}
    generate_text(GenerateRun(folder, **options))
    whole = capsys.readouterr().out
    generate_text(GenerateRun(folder, **options, draft=4))
    assert capsys.readouterr().out == whole
    for start, end in ((9, 10), (7, 12), (3, 20)):
        word = whole[start:end]
        generate_text(GenerateRun(folder, **options, stop=("never this", word)))
        assert capsys.readouterr().out == whole[: whole.index(word, 1) + len(word)] + "\n"


def test_eval_prints_and_draws_bits_by_position(folder, run, tmp_path, capsys):
    bins = evaluate_run(EvalRun(folder, length=128))
    printed = capsys.readouterr().out
    assert "held out of training" in printed
    assert "length 32" in printed
    assert bins[0].bits_per_byte > bins[-1].bits_per_byte
    assert (folder / "positions.png").read_bytes().startswith(b"\x89PNG")
    other = tmp_path / "other.txt"
    other.write_text("".join(LINES))
    drawn = (folder / "positions.png").read_bytes()
    evaluate_run(EvalRun(folder, data=str(other), length=16, max_bytes=300))
    printed = capsys.readouterr().out
    assert f"drawn in {folder / 'positions-other.png'}" in printed
    assert (folder / "positions.png").read_bytes() == drawn
    assert "held out" not in printed
    assert "300 bytes" in printed


def test_a_model_without_a_run_is_measured_on_the_data_that_are_given(folder, tmp_path, capsys):
    CausalLM.load(folder).save(tmp_path / "alone")
    text = tmp_path / "text.txt"
    text.write_text("".join(LINES))
    of_run = evaluate_run(EvalRun(folder, data=str(text), length=16))
    capsys.readouterr()
    given = {"data": str(text), "length": 16, "output": tmp_path / "bits.png"}
    before = sorted((tmp_path / "alone").iterdir())
    assert evaluate_run(EvalRun(tmp_path / "alone", **given)) == of_run
    assert (tmp_path / "bits.png").exists()
    assert sorted((tmp_path / "alone").iterdir()) == before
    printed = capsys.readouterr().out
    assert "length 16" in printed
    assert "length 128" not in printed
    with pytest.raises(RunFolderError, match="not the folder of a run"):
        evaluate_run(EvalRun(tmp_path / "alone"))


def test_eval_never_measures_on_training_data_unsaid(folder, run, tmp_path, capsys):
    """Cut by --max-bytes, the data are those of the run; changed, they are refused."""
    data = tmp_path / "data.txt"
    data.write_text("".join(LINES) * 2)
    short = dataclasses.replace(
        run, data=str(data), runs=tmp_path / "runs", max_bytes=5000, sample_bytes=0,
        loop=LoopOptions(steps=2), name="short",
    )  # fmt: skip
    made = train_text(short)
    for given in (None, str(data)):
        capsys.readouterr()
        evaluate_run(EvalRun(made, data=given))
        assert "held out of training: 500 bytes" in capsys.readouterr().out.splitlines()[0]
    data.write_text(data.read_text().replace("99", "98", 1))
    for given in (None, str(data)):
        with pytest.raises(DataError, match=r"is not what .*short was trained on .*deltarule eval"):
            evaluate_run(EvalRun(made, data=given))
    copy = tmp_path / "copy.txt"
    copy.write_text(data.read_text())
    evaluate_run(EvalRun(made, data=str(copy)))
    assert "trained on or not" in capsys.readouterr().out.splitlines()[0]


def test_what_follows_the_training_shows_how_far_it_is(run, tmp_path, capsys, monkeypatch):
    """As on a machine on which each look at the clock is 11 seconds after the one before."""
    now = itertools.count(step=11.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    loop = LoopOptions(steps=1, evaluate_every=1)
    train_text(dataclasses.replace(run, runs=tmp_path, sample_bytes=5, loop=loop))
    shown = capsys.readouterr().out
    for what in ("gzip", "xz", "validation, length 32", "validation, length 128"):
        assert re.search(rf"^{what} [0-9,]+/[0-9,]+", shown, re.MULTILINE), what


def test_a_stopped_run_generates_and_is_evaluated(folder, run, capsys, monkeypatch):
    cut = dataclasses.replace(run, name="cut")
    crash_at(41, monkeypatch, lambda: train_text(cut))
    made = run.runs / "cut"
    assert not (made / "model.safetensors").exists()
    options = {"prompt": "99 b", "max_new_tokens": 12, "temperature": 0.0}
    capsys.readouterr()
    generate_text(GenerateRun(made, **options))
    note, text = capsys.readouterr().out.split("\n", 1)
    assert note == f"note: {made} is not finished: this is its checkpoint of step 30"
    # Drawn first: a figure in its folder would damage the checkpoint.
    assert main(["plot", "attention", str(made / "checkpoints" / "step-30")]) == 0
    assert f"drawn in {made / 'attention.png'}" in capsys.readouterr().out
    generate_text(GenerateRun(made / "checkpoints" / "step-30", **options))
    assert capsys.readouterr().out == text
    evaluate_run(EvalRun(made, length=128))
    assert "held out of training" in capsys.readouterr().out
    assert (made / "positions.png").exists()
    # A newer one that is damaged is passed over, as it is when the run goes on.
    shutil.copytree(made / "checkpoints" / "step-30", made / "checkpoints" / "step-40")
    generate_text(GenerateRun(made, **options))
    skipped, *rest = capsys.readouterr().out.split("\n", 2)
    assert "skipped a damaged checkpoint" in skipped
    assert rest == [note, text]
    # Without run.json a model that is there counts.
    CausalLM.load(folder).save(made)
    (made / "run.json").unlink()
    generate_text(GenerateRun(made, **options))
    generate_text(GenerateRun(folder, **options))
    both = capsys.readouterr().out
    assert both == 2 * both[: len(both) // 2]


def test_more_steps_go_on_from_the_end(folder, run, capsys):
    first = dataclasses.replace(
        run, name="longer", loop=dataclasses.replace(run.loop, steps=20), sample_bytes=0
    )
    made = train_text(first)
    loop = dataclasses.replace(run.loop, steps=40, max_seconds=0)
    train_text(dataclasses.replace(first, resume=True, loop=loop))
    rows = [row["step"] for row in read_metrics(made / "metrics.jsonl") if "loss" in row]
    assert rows == list(range(1, 22))
    assert "steps 20 -> 40" in capsys.readouterr().out


def test_three_bytes_are_enough_to_validate_on_and_none_is_said_before_training(run, tmp_path):
    data = tmp_path / "x.txt"
    data.write_text("".join(LINES))
    for fraction in (1e-6, 0.9999999):
        none = dataclasses.replace(run, data=str(data), runs=tmp_path, validation_fraction=fraction)
        with pytest.raises(DataError, match=r"--validation-fraction .* leaves nothing to"):
            train_text(none)
    loop = LoopOptions(steps=1, evaluate_every=1)
    train_text(dataclasses.replace(run, runs=tmp_path, validation_bytes=3, loop=loop))


SENSELESS = {
    TextRun: ({"length": 0}, {"temperature": -1.0}, {"max_bytes": -5}),
    LoopOptions: ({"steps": 0}, {"accumulate": 0}, {"max_seconds": -1.0}),
    OptimizerOptions: (
        {"lr": -1.0}, {"lr": float("nan")}, {"beta2": 1.0}, {"clip": -1}, {"start_lr_ratio": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"), [(kind, one) for kind, several in SENSELESS.items() for one in several]
)
def test_senseless_options_are_refused(kind, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        kind(**options)
    with pytest.raises(ValueError, match="accumulate=3"):
        TextRun(batch_tokens=128, loop=LoopOptions(accumulate=3))
