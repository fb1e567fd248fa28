"""`deltarule train mqar`: associative recall, solved by a delta rule and not by a plain sum."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deltarule.models import CausalLM, ModelConfig, next_token_loss
from deltarule.plots.loss_curve import loss_curve
from deltarule.tasks import mqar
from deltarule.train.loop import Hidden, LoopOptions, Trainer, evaluating
from deltarule.train.metrics import Metrics, read_metrics
from deltarule.train.optimizer import OptimizerOptions
from deltarule.train.random_state import seed_everything
from deltarule.train.run_folder import open_run

COMMAND = "train mqar"
# Keeps the rows of evaluations apart from those of training, whose streams count from 0.
EVALUATION = 2**40


@dataclass(frozen=True)
class MqarRun:
    """Train a small model on multi-query associative recall, and keep everything in runs/NAME."""

    layer: str = "deltanet"
    """Mixer of both blocks; `deltarule rules` lists them. Try linear_attention beside it."""
    name: str | None = None
    """Name of the run; None is mqar-LAYER, mqar-LAYER-2 and so on."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    resume: bool = False
    """Continue a run where its newest checkpoint is, to the same bits as without the stop."""
    batch_rows: int = 64
    """Rows in each optimizer step, all of them new."""
    evaluation_rows: int = 3000
    """Rows of the last evaluation, which training never saw."""
    num_layers: int = 2
    """Blocks."""
    hidden_size: int = 64
    """Channels of the residual stream."""
    num_heads: int = 2
    """Heads of each mixer."""
    conv_size: int = 0
    """Taps of the short convolution; 0 leaves it out, since with it every layer solves the task."""
    mlp_size: int = 0
    """Channels inside the MLP; 0 leaves it out."""
    output_gate: bool | None = None
    """Gate each mixer's output; None is the layer's own default."""
    beta_max: float = 1.0
    """Largest write strength; 2 allows negative eigenvalues."""
    norm_eps: float = 1e-2
    """Added to the mean square in every norm. A small one blows up the reading of an empty state to
    the size of a real one, and the solution is found late or never."""
    task: mqar.Config = field(default_factory=mqar.Config)
    optimizer: OptimizerOptions = field(
        default_factory=lambda: OptimizerOptions(
            lr=1e-2,
            min_lr_ratio=0.0,
            warmup_steps=50,
            weight_decay=0.1,
            decay_embeddings=True,
            beta2=0.98,
        )
    )
    loop: LoopOptions = field(default_factory=lambda: LoopOptions(steps=2158))

    def __post_init__(self) -> None:
        """Refuse what no run can do."""
        for name in ("batch_rows", "evaluation_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.batch_rows % self.loop.accumulate:
            raise ValueError(
                f"batch_rows must be a multiple of accumulate={self.loop.accumulate}, "
                f"got {self.batch_rows}"
            )

    def config(self) -> ModelConfig:
        """The model's configuration."""
        return ModelConfig(
            vocab_size=self.task.vocab_size, hidden_size=self.hidden_size,
            num_layers=self.num_layers, layer_types=(self.layer,), num_heads=self.num_heads,
            conv_size=self.conv_size, mlp_size=self.mlp_size, output_gate=self.output_gate,
            beta_max=self.beta_max,
            norm_eps=self.norm_eps,
        )  # fmt: skip


class MqarJob:
    """New rows at every step, and the cross entropy of the answers."""

    def __init__(self, run: MqarRun) -> None:
        """Start at the first rows."""
        self.task, self.seed = run.task, run.loop.seed
        self.rows = run.batch_rows // run.loop.accumulate
        self.batch_tokens = run.batch_rows * run.task.length
        self.drawn = 0

    def next(self) -> mqar.Batch:
        """The next rows, a function of the seed and of how many were drawn before."""
        self.drawn += 1
        return self.draw(self.drawn, self.rows)

    def draw(self, stream: int, rows: int) -> mqar.Batch:
        """The rows of one stream of random numbers."""
        return mqar.generate(self.task, np.random.default_rng((self.seed, stream)), rows)

    def loss(self, model: CausalLM, hidden: Hidden, batch: mqar.Batch) -> tuple[Tensor, Tensor]:
        """Mean nats an answer, and the share of right answers."""
        device = model.embedding.weight.device
        tokens, labels = (torch.from_numpy(x).to(device) for x in batch)
        x, _ = hidden(tokens)
        # The head is the widest matrix here, and most positions ask for nothing.
        asked = labels != mqar.NO_LABEL
        answers, guesses = labels[asked], model.logits(x[asked])
        return next_token_loss(guesses, answers), (guesses.argmax(-1) == answers).float().mean()

    def shown(self, figures: list[float]) -> dict[str, float]:
        """The accuracy."""
        return {"accuracy": figures[0]}

    def evaluate(self, model: CausalLM) -> dict[str, float]:
        """Accuracy on rows that training never sees."""
        return {"validation_accuracy": self.accuracy(model, rows=256)}

    def accuracy(self, model: CausalLM, *, rows: int) -> float:
        """The share of right answers on new rows, the same ones every time."""
        right, first = 0.0, 0
        while first < rows:
            batch = self.draw(EVALUATION + first, min(256, rows - first))
            right += self.loss(model, model.hidden, batch)[1].item() * len(batch.tokens)
            first += len(batch.tokens)
        return right / rows

    def position(self) -> dict[str, int]:
        """How many batches were drawn."""
        return {"drawn": self.drawn}

    def seek(self, position: dict[str, int]) -> None:
        """Go to a position."""
        self.drawn = position["drawn"]


def train_mqar(run: MqarRun) -> float:
    """Train, evaluate and plot.

    Args:
        run: What to do, every number of it.

    Returns:
        The accuracy on new rows at the end.

    Raises:
        ValueError: An option is out of range or names something unknown.
        DivergedError: The loss is not finite.
        InterruptedRunError: Ctrl-C; a checkpoint was written.
    """
    began = time.monotonic()
    config = run.config()
    with open_run(run, COMMAND, f"mqar-{run.layer}", facts={}) as folder:
        seed_everything(run.loop.seed)
        model = CausalLM(config)
        job = MqarJob(run)
        parameters = sum(p.numel() for p in model.parameters())
        print(f"run     {folder}")
        print(f"task    {run.task.pairs} pairs in {run.task.length} tokens, 1 in {run.task.pairs} "
              f"by chance ({run.task.chance:.1%})")  # fmt: skip
        print(f"model   {run.num_layers} layers of {run.layer}, {parameters:,} parameters")
        trainer = Trainer(
            model, job, options=run.loop, optimizer_options=run.optimizer, folder=folder,
            resume=run.resume,
        )  # fmt: skip
        trainer.run()
        model.save(folder)
        accuracy = finish(run, trainer, job)
        print(f"done in {time.monotonic() - began:.0f} s: {folder}")
    return accuracy


def finish(run: MqarRun, trainer: Trainer, job: MqarJob) -> float:
    """Evaluate on new rows and draw the curve."""
    with evaluating(trainer.model):
        accuracy = job.accuracy(trainer.model, rows=run.evaluation_rows)
    print(f"\naccuracy {accuracy:.2%} on {run.evaluation_rows:,} new rows "
          f"(chance {run.task.chance:.1%})")  # fmt: skip
    path = trainer.folder / "metrics.jsonl"
    with Metrics(path, after=trainer.step) as metrics:
        metrics.write({"step": trainer.step, "final_accuracy": accuracy})
    loss_curve(
        read_metrics(path), trainer.folder / "accuracy.png", trained="accuracy",
        evaluated="validation_accuracy", label="accuracy", levels={"chance": run.task.chance},
        title=f"Associative recall, {run.layer}",
    )  # fmt: skip
    return accuracy
