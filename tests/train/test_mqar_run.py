"""`deltarule train mqar` end to end, on a task small enough for seconds."""

import dataclasses

from deltarule.tasks.mqar import Config
from deltarule.train.loop import LoopOptions
from deltarule.train.metrics import read_metrics
from deltarule.train.mqar import MODEL, MqarRun, train_mqar
from deltarule.train.optimizer import OptimizerOptions


def small(tmp_path, **model):
    return MqarRun(
        runs=tmp_path, model=dataclasses.replace(MODEL, hidden_size=16, **model), batch_rows=32,
        evaluation_rows=40, task=Config(length=8, pairs=2, vocab_size=8),
        optimizer=OptimizerOptions(lr=2e-2, warmup_steps=10),
        loop=LoopOptions(steps=300, save_every=200, evaluate_every=100),
    )  # fmt: skip


def test_a_small_task_is_learned_shown_and_drawn(tmp_path, capsys):
    run = small(tmp_path)
    accuracy = train_mqar(run)
    assert accuracy > 0.75
    printed = capsys.readouterr().out
    assert "accuracy" in printed.splitlines()[3]
    assert (tmp_path / "mqar-deltanet" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    rows = read_metrics(tmp_path / "mqar-deltanet" / "metrics.jsonl")
    assert rows[-1] == {"step": 300, "final_accuracy": accuracy}
    assert train_mqar(dataclasses.replace(run, resume=True)) == accuracy
    assert read_metrics(tmp_path / "mqar-deltanet" / "metrics.jsonl") == rows
