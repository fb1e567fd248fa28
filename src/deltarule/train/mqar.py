"""`deltarule train mqar`: associative recall, solved by a delta rule and not by a plain sum."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from deltarule.nn.checks import check_least, check_multiple
from deltarule.parallel import World
from deltarule.tasks import mqar
from deltarule.train.device import choose_device
from deltarule.train.job import LoopOptions, ModelOptions
from deltarule.train.labelled import EVALUATION, LabelledJob, Rows, draw_rows, measure
from deltarule.train.loop import Trainer, evaluating
from deltarule.train.metrics import WatchOptions, read_metrics
from deltarule.train.optimizer import OptimizerOptions
from deltarule.train.whole_run import keep_figures, whole_run

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
    """Continue a run from its newest checkpoint; the result is as if it had never stopped."""
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


def train_mqar(run: MqarRun) -> float:
    began, task = time.monotonic(), run.task
    config, world = run.model.config(task.vocab_size), World(choose_device(run.loop.device))
    job = LabelledJob(
        mqar, Rows(task, run.batch_rows), Rows(task, WATCHED_ROWS), seed=run.loop.seed,
        accumulate=run.loop.accumulate, ahead=world.device.type == "cuda",
    )  # fmt: skip

    def describe(folder: Path) -> None:
        print(f"run     {folder}")
        print(f"task    {task.pairs} pairs in {task.length} tokens, 1 in {task.pairs} "
              f"by chance ({task.chance:.1%})")  # fmt: skip

    folder = whole_run(
        run, "train mqar", f"mqar-{'-'.join(run.model.layer_types)}", config, job, describe,
        lambda trainer: finish(run, trainer), world=world, began=began,
    )  # fmt: skip
    return read_metrics(folder / "metrics.jsonl")[-1]["final_accuracy"]


def finish(run: MqarRun, trainer: Trainer) -> None:
    rows = draw_rows(
        mqar, run.task, seed=run.loop.seed, stream=EVALUATION, rows=run.evaluation_rows
    )
    with evaluating(trainer.model):
        accuracy = measure(trainer.model, mqar, run.task, rows)["accuracy"]
    print(f"\naccuracy {accuracy:.2%} on {run.evaluation_rows:,} new rows "
          f"(chance {run.task.chance:.1%})")  # fmt: skip
    levels = {"chance": run.task.chance}
    keep_figures(trainer, {"accuracy": accuracy}, "accuracy.png", "accuracy", levels)
