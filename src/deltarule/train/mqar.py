"""`deltarule train mqar`: associative recall, solved by a delta rule and not by a plain sum."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from deltarule.models import CausalLM
from deltarule.nn.checks import check_least, check_multiple
from deltarule.tasks import mqar
from deltarule.train.device import choose_device
from deltarule.train.figures import loss_curve
from deltarule.train.labelled import LabelledJob, measure
from deltarule.train.loop import LoopOptions, Trainer, evaluating
from deltarule.train.metrics import Metrics, read_metrics
from deltarule.train.model_options import ModelOptions
from deltarule.train.optimizer import OptimizerOptions
from deltarule.train.random_state import seed_everything
from deltarule.train.run_folder import open_run
from deltarule.train.task_rows import EVALUATION, Rows, draw_rows
from deltarule.train.watch import WatchOptions, sinks
from deltarule.train.whole_run import layers_of, model_line, train_and_finish

COMMAND = "train mqar"
# Of the short evaluations of the curve.
WATCHED_ROWS = 256
# With a convolution every layer solves the task. A small eps blows up the reading of an empty state
# to the size of a real one, and the solution is found late or never.
MODEL = ModelOptions(
    layer_types=("deltanet",), hidden_size=64, head_k_dim=None, head_v_dim=None, conv_size=0,
    mlp_size=0, beta_max=1.0, norm_eps=1e-2,
)  # fmt: skip


@dataclass(frozen=True)
class MqarRun:
    """Train a small model on multi-query associative recall, and keep everything in runs/NAME."""

    name: str | None = None
    """Name of the run; None is mqar-LAYERS, mqar-LAYERS-2 and so on."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    resume: bool = False
    """Continue a run where its newest checkpoint is, to the same bits as without the stop."""
    batch_rows: int = 64
    """Rows in each optimizer step, all of them new."""
    evaluation_rows: int = 3000
    """Rows of the last evaluation, which training never saw."""
    task: mqar.Config = field(default_factory=mqar.Config)
    model: ModelOptions = MODEL
    optimizer: OptimizerOptions = field(
        default_factory=lambda: OptimizerOptions(
            lr=1e-2, min_lr_ratio=0.0, warmup_steps=50, decay_embeddings=True, beta2=0.98
        )
    )
    loop: LoopOptions = field(default_factory=lambda: LoopOptions(steps=2158))
    watch: WatchOptions = field(default_factory=WatchOptions)

    def __post_init__(self) -> None:
        check_least(self, 1, "batch_rows", "evaluation_rows")
        check_multiple("batch_rows", self.batch_rows, "accumulate", self.loop.accumulate)


def mqar_job(run: MqarRun) -> LabelledJob:
    return LabelledJob(
        mqar, Rows(run.task, run.batch_rows), Rows(run.task, WATCHED_ROWS),
        seed=run.loop.seed, accumulate=run.loop.accumulate,
    )  # fmt: skip


def train_mqar(run: MqarRun) -> float:
    """Train, evaluate and plot; return the accuracy on new rows at the end."""
    began = time.monotonic()
    config = run.model.config(run.task.vocab_size)
    device = str(choose_device(run.loop.device))
    name = f"mqar-{'-'.join(run.model.layer_types)}"
    with (
        open_run(run, COMMAND, name, device=device) as folder,
        sinks(run.watch.log, folder, first=True) as also,
    ):
        seed_everything(run.loop.seed)
        model = CausalLM(config)
        job = mqar_job(run)
        print(f"run     {folder}")
        print(f"task    {run.task.pairs} pairs in {run.task.length} tokens, 1 in {run.task.pairs} "
              f"by chance ({run.task.chance:.1%})")  # fmt: skip
        print(model_line(model))
        trainer = Trainer(
            model, job, options=run.loop, optimizer_options=run.optimizer, folder=folder,
            resume=run.resume, patience=run.watch.patience, began=began, also=also,
        )  # fmt: skip
        train_and_finish(trainer, lambda: finish(run, trainer), began)
    return read_metrics(folder / "metrics.jsonl")[-1]["final_accuracy"]


def finish(run: MqarRun, trainer: Trainer) -> None:
    rows = draw_rows(
        mqar, run.task, seed=run.loop.seed, stream=EVALUATION, rows=run.evaluation_rows
    )
    with evaluating(trainer.model):
        accuracy = measure(trainer.model, mqar, run.task, rows)["accuracy"]
    print(f"\naccuracy {accuracy:.2%} on {run.evaluation_rows:,} new rows "
          f"(chance {run.task.chance:.1%})")  # fmt: skip
    path = trainer.folder / "metrics.jsonl"
    with Metrics(path, after=trainer.step, also=trainer.also) as metrics:
        metrics.write({"step": trainer.step, "final_accuracy": accuracy})
    loss_curve(
        read_metrics(path), trainer.folder / "accuracy.png", trained="accuracy",
        evaluated="validation_accuracy", label="accuracy", levels={"chance": run.task.chance},
        title=f"Associative recall, {layers_of(trainer.model)}",
    )  # fmt: skip
