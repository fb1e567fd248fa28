"""The loop: resumed runs are the same bits, divergence and signals lose nothing, options work."""

import math
import os
import signal
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import deltarule.train.metrics
from deltarule.errors import INTERRUPTED, DivergedError
from deltarule.models import CheckpointError, compile_blocks
from deltarule.train.checkpoint import Checkpoints
from deltarule.train.data import encode_documents
from deltarule.train.device import choose_device
from deltarule.train.extra import MissingExtraError
from deltarule.train.loop import Interrupt, InterruptedRunError, LoopOptions, Trainer, _brief
from deltarule.train.metrics import Best, read_metrics, sinks
from deltarule.train.optimizer import OptimizerOptions
from deltarule.train.text import TextJob, TextRun
from small import crash_at, small_model

TEXTS = [bytes(range(97, 123)) * 8, b"the quick brown fox jumps over the lazy dog. " * 6]


def make_trainer(folder, *, resume=False, patience=0, **loop):
    options = LoopOptions(**{"steps": 8, "save_every": 4, "evaluate_every": 4, **loop})
    run = TextRun(length=16, batch_tokens=48, loop=options)
    corpus = encode_documents(TEXTS)
    folder.mkdir(exist_ok=True)
    return Trainer(
        small_model(mlp_size=16), TextJob(run, corpus, corpus), options=options,
        optimizer_options=OptimizerOptions(lr=1e-2, warmup_steps=2),
        folder=folder, resume=resume, patience=patience,
    )  # fmt: skip


def same_bits(first, second):
    first, second = first.model.state_dict(), second.model.state_dict()
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_compiled_run_compiles_its_steps_alone(tmp_path, monkeypatch):
    torch.compiler.reset()
    plain, compiled = make_trainer(tmp_path / "plain"), []
    backend = lambda graph, _: compiled.append(graph) or graph.forward  # noqa: E731
    blocks = partial(compile_blocks, backend=backend)
    monkeypatch.setattr("deltarule.train.loop.compile_blocks", blocks)
    trainer = make_trainer(tmp_path / "compiled", compile=True)
    assert plain.run()
    assert trainer.run()
    # One block for one number of documents, and twice more for any; evaluations add nothing.
    assert len(compiled) == 3
    for a, b in zip(plain.model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("crash", [4, 6])
def test_resume_continues_to_the_same_bits(tmp_path, crash, accumulate, monkeypatch):
    straight = make_trainer(tmp_path / "straight", accumulate=accumulate)
    assert straight.run()
    crashed = make_trainer(tmp_path / "resumed", accumulate=accumulate)
    crash_at(crash, monkeypatch, crashed.run)
    torch.manual_seed(12345)
    resumed = make_trainer(tmp_path / "resumed", accumulate=accumulate, resume=True)
    assert resumed.step == 4
    after_load = torch.rand(3)
    resumed.restore()
    assert torch.equal(torch.rand(3), after_load)
    assert resumed.run()
    assert same_bits(straight, resumed)
    assert straight.job.position() == resumed.job.position()
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("straight", "resumed")]
    losses = [[row["loss"] for row in run if "loss" in row] for run in rows]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8


def test_a_loss_or_gradient_that_is_not_finite_stops_and_keeps_the_last_checkpoint(tmp_path):
    trainer = make_trainer(tmp_path / "loss")
    compute = trainer.job.loss
    trainer.job.loss = lambda *given: tuple(
        x * (math.nan if trainer.step == 5 else 1.0) for x in compute(*given)
    )
    with pytest.raises(DivergedError, match=r"loss is not finite at step 6 .* step-4;"):
        trainer.run()
    assert trainer.checkpoints.newest().step == 4
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    trainer = make_trainer(tmp_path / "gradient")
    trainer.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(DivergedError, match=r"gradient is not finite .* 1 .*no checkpoint yet"):
        trainer.run()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_step_saves_it_and_restores_the_handler(tmp_path, number, request):
    # Under nohup SIGHUP is ignored, and stays so.
    outside = signal.signal(number, before := signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(number, outside))
    trainer = make_trainer(tmp_path, save_every=100)
    draw = trainer.job.next

    def signalled():
        if trainer.step == 2:
            os.kill(os.getpid(), number)
        return draw()

    trainer.job.next = signalled
    with pytest.raises(InterruptedRunError, match="after step 3") as ended:
        trainer.run()
    # A scheduler is told that all is in order, a shell that it was interrupted.
    assert ended.value.code == (0 if number == signal.SIGTERM else INTERRUPTED)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [3]
    assert signal.getsignal(number) == before
    resumed = make_trainer(tmp_path, save_every=100, resume=True)
    resumed.run()
    straight = make_trainer(tmp_path / "straight")
    straight.run()
    assert same_bits(straight, resumed)


def test_a_checkpoint_is_due_by_time_too(tmp_path):
    trainer = make_trainer(tmp_path, steps=4, save_every=100, keep=9)
    trainer.save_seconds = 0.0
    trainer.run()
    assert trainer.checkpoints.steps() == [1, 2, 3, 4]


def test_training_may_end_early_and_stays_ended(tmp_path):
    trainer = make_trainer(tmp_path, steps=20)
    seen = []
    trainer.stop_when = lambda measured: seen.append(measured) or len(seen) == 2
    assert trainer.run()
    assert trainer.step == 8
    assert seen[0].keys() == {"validation_bits_per_byte"}
    resumed = make_trainer(tmp_path, steps=20, resume=True)
    assert resumed.run()
    assert resumed.step == 8


def test_accumulation_splits_the_step_and_nothing_else(tmp_path):
    whole = make_trainer(tmp_path / "whole", steps=1)
    parts = make_trainer(tmp_path / "parts", steps=1, accumulate=3)
    whole.run()
    parts.run()
    assert parts.job.rows.row_tokens == 16
    assert parts.job.position() == whole.job.position()
    # Rows end elsewhere, so some pieces are cut in two: close, not equal.
    for one, three in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert (one - three).abs().max() <= 0.011


def test_bfloat16_keeps_float32_weights_and_still_learns(tmp_path):
    options = {"dtype": "bfloat16", "activation_checkpointing": True, "evaluate_every": 0}
    trainer = make_trainer(tmp_path, steps=20, **options)
    trainer.run()
    assert trainer.model.activation_checkpointing
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    losses = [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 1


def test_metrics_hold_what_the_plots_need_and_no_line_cut_short_by_a_kill(tmp_path):
    make_trainer(tmp_path).run()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    assert [row["step"] for row in rows if "validation_bits_per_byte" in row] == [4, 8]
    assert rows[0]["bits_per_byte"] == pytest.approx(rows[0]["loss"] / math.log(2), rel=1e-5)
    assert {"lr", "gradient_norm", "tokens_per_s", "seconds"} <= rows[0].keys()


@pytest.mark.parametrize(
    "line",
    [b"[]", b"{", b"\xff", b"[" * 100_000, b'{"step": "1"}', b'{"step": 1' + b"0" * 9999 + b"}"],
)
def test_a_line_that_is_no_row_is_left_out_with_a_note(tmp_path, line, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    assert [row["step"] for row in read_metrics(path)] == [1, 3]
    said = capsys.readouterr().out
    assert said.startswith(f"note: {path}: left out 1 of 3 lines; line 2: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("value", [None, [], {}, "x", -1, 1.5, 2**62, {"epoch": []}, ["a"]])
@pytest.mark.parametrize("name", ["position", "random", "seconds", "stopped", "flux"])
def test_a_state_of_other_types_is_refused_by_name(tmp_path, name, value):
    trainer = make_trainer(tmp_path, steps=1)
    trainer.run()
    newest = trainer.checkpoints.newest()
    changed = newest._replace(state=newest.state | {name: value})
    trainer.checkpoints.newest = lambda: changed
    if name == "seconds" and isinstance(value, int | float):
        trainer.restore()
        return
    with pytest.raises(CheckpointError, match=r"step-1/state\.json: ") as caught:
        trainer.restore()
    assert "\n" not in str(caught.value)


def test_what_nohup_ignores_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupt.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_checkpoint_of_another_model_is_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.run()
    model = trainer.model
    model.extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(CheckpointError, match="'extra' is missing"):
        trainer.restore()
    del model.extra, model.norm.weight
    with pytest.raises(CheckpointError, match=r"'norm\.weight' is there, and the model has none"):
        trainer.restore()
    model.norm.weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"'norm\.weight' is \[16\], in the model \[1\]"):
        trainer.restore()


def test_a_device_that_is_not_there_is_named_and_of_what_pytorch_says_one_sentence(monkeypatch):
    for name in ("cuda:99", "gpu", "meta2"):
        with pytest.raises(ValueError, match=f"--device {name}.*cpu") as caught:
            choose_device(name)
        assert len(str(caught.value)) < 120
    said = (
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and so on"
    )
    monkeypatch.setattr("torch.empty", lambda *_, **__: (_ for _ in ()).throw(RuntimeError(said)))
    with pytest.raises(ValueError, match=r"not available here \(Found no .* system\); try cpu"):
        choose_device("cuda:0")


@pytest.mark.parametrize(
    ("value", "shown"), [(1.0612, "1.061"), (13.355, "13.4"), (131.6, "132"), (13127.4, "13,127")]
)
def test_a_small_rate_does_not_read_like_thousands(value, shown):
    assert _brief(value) == shown


def scripted(trainer, values):
    """Short evaluations that measure these values, one after the other."""
    left = iter(values)
    trainer.job.evaluate = lambda model: {"validation_bits_per_byte": next(left)}


def test_patience_ends_training_and_keeps_the_best(tmp_path):
    trainer = make_trainer(tmp_path, steps=40, evaluate_every=2, save_every=3, keep=1, patience=3)
    weights = {}
    step = trainer._step

    def stepped(metrics, progress):
        step(metrics, progress)
        weights[trainer.step] = trainer.model.embedding.weight.detach().clone()

    trainer._step = stepped
    scripted(trainer, [5.0, 3.0, math.nan, 4.0, 3.0])
    assert trainer.run()
    assert trainer.step == 10
    assert trainer.best.step == 4
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4, 10]
    assert trainer.take_best() == 4
    assert torch.equal(trainer.model.embedding.weight, weights[4])
    # It stays ended, until more patience is given.
    assert make_trainer(tmp_path, steps=40, patience=3, resume=True).complete
    more = make_trainer(tmp_path, steps=40, evaluate_every=2, keep=1, patience=4, resume=True)
    scripted(more, [1.0, 2.0, 2.0, 2.0, 2.0])
    assert more.run()
    assert more.best.step == 12
    assert more.step == 20
    assert Checkpoints(tmp_path / "checkpoints").steps() == [12, 20]


def test_without_patience_nothing_is_kept_and_an_accuracy_is_better_the_higher(tmp_path):
    trainer = make_trainer(tmp_path, steps=8, evaluate_every=2, keep=1)
    scripted(trainer, [1.0, 2.0, 3.0, 4.0])
    assert trainer.run()
    assert trainer.checkpoints.steps() == [8]
    assert trainer.take_best() == 8
    best = Best().after(1, {"validation_accuracy": 0.5}).after(2, {"validation_accuracy": 0.6})
    assert best.step == 2
    assert best.after(3, {"validation_accuracy": 0.6}) == Best(2, -0.6, 1)


def test_max_seconds_counts_what_precedes_and_leaves_time_for_what_follows(tmp_path):
    trainer = make_trainer(tmp_path, steps=10_000, save_every=10_000, max_seconds=100)
    trainer.began = time.monotonic() - 60
    asked = []
    trainer.reserve = lambda seconds: asked.append(seconds) or 41
    assert not trainer.run()
    assert trainer.checkpoints.steps() == [trainer.step] == [1]
    assert asked[0] > 0
    trainer.began, trainer.reserve = time.monotonic() - 101, None
    assert not trainer.run()
    assert trainer.step == 2


def test_metrics_go_to_other_programs_too(tmp_path, monkeypatch):
    rows, closed = {}, []
    writer = SimpleNamespace(
        add_scalar=lambda name, value, step: rows.setdefault(step, {}).update({name: value}),
        close=lambda: closed.append("tensorboard"),
    )
    run = SimpleNamespace(
        log=lambda row, step: rows.setdefault(-step, {}).update(row),
        finish=lambda: closed.append("wandb"),
    )
    parts = {
        "tensorboard": SimpleNamespace(),
        "torch.utils.tensorboard": SimpleNamespace(SummaryWriter=lambda folder: writer),
        "wandb": SimpleNamespace(init=lambda **_: run),
    }
    monkeypatch.setattr(deltarule.train.metrics, "require", lambda name, extra="": parts[name])
    with sinks(("tensorboard", "wandb"), tmp_path, first=True) as also:
        trainer = make_trainer(tmp_path, steps=2, evaluate_every=2)
        trainer.also = also
        trainer.run()
    assert closed == ["wandb", "tensorboard"]
    expected = read_metrics(tmp_path / "metrics.jsonl")
    assert rows[1] == rows[-1] == {n: x for n, x in expected[0].items() if n != "step"}
    assert "validation_bits_per_byte" in rows[2]
    with sinks(("wandb",), tmp_path, first=False) as also:
        assert also == []
    monkeypatch.undo()
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        needed = pytest.raises(MissingExtraError, match=rf"deltarule\[{name}\]")
        with needed, sinks((name,), tmp_path, first=True):
            pass
