"""MAD: six small tasks that tell layers apart; table 1 of DeltaNet, at its baseline settings."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deltarule.models import ModelConfig
from deltarule.tasks import (
    mad_compression,
    mad_copying,
    mad_fuzzy_recall,
    mad_memorization,
    mad_recall,
)
from deltarule.train.loop import LoopOptions
from deltarule.train.optimizer import OptimizerOptions
from experiments.autoencoder import AutoencoderCell
from experiments.experiment import Experiment, Result, Scale, finished
from experiments.figures import Curve, Panel, draw_curves, title_of
from experiments.markdown import markdown_table
from experiments.task_cell import Evaluation, TaskCell, accuracy
from experiments.training_curve import training_curve


@dataclass(frozen=True)
class Setting:
    """A task at one setting, and how much of it a model sees."""

    title: str
    task: str
    """Key in `deltarule.tasks.TASKS`."""
    config: Any
    """Of the rows that are measured."""
    steps: int
    rows: int = 128
    """Of a batch."""
    examples: int | None = 12_800
    """Different rows; None for new ones at every step."""

    @property
    def training(self) -> Any:
        """Of the rows that are learned: where that is different, every next token is a label."""
        own = hasattr(self.config, "training")
        return replace(self.config, training=True) if own else self.config


# 50 epochs of 100 batches; two batches are all of memorization's rows, so that it gets all 200.
STEPS, MEMORIZATION_STEPS = 50 * 100, 200 * 2
RECALL, COPYING = mad_recall.Config(), mad_copying.Config()
SETTINGS: dict[Scale, dict[str, Setting]] = {
    "laptop": {
        "recall": Setting(
            "In-context recall", "mad_recall", RECALL, steps=3000, rows=32, examples=None
        ),
        "copying": Setting(
            "Selective copying, 128 tokens", "mad_copying", replace(COPYING, length=128),
            steps=2500, rows=16, examples=None,
        ),
    },
    "gpu": {
        "compression": Setting(
            "Compression", "mad_compression", mad_compression.Config(), STEPS
        ),
        "fuzzy": Setting(
            "Fuzzy recall", "mad_fuzzy_recall", mad_fuzzy_recall.Config(), STEPS
        ),
        "recall": Setting("In-context recall", "mad_recall", RECALL, STEPS),
        "memorization": Setting(
            "Memorization", "mad_memorization", mad_memorization.Config(), MEMORIZATION_STEPS,
            examples=256,
        ),
        "noisy": Setting(
            "Noisy recall", "mad_recall",
            mad_recall.Config(vocab_size=32, noise_vocab_size=16, noise=0.2), STEPS,
        ),
        "copying": Setting("Selective copying", "mad_copying", COPYING, STEPS),
    },
}  # fmt: skip
LAYERS: dict[Scale, tuple[str, ...]] = {
    "laptop": ("linear_attention", "attention", "deltanet"),
    "gpu": ("linear_attention", "gla", "attention", "gated_deltanet", "deltanet"),
}
WIDTHS: dict[Scale, int] = {"laptop": 64, "gpu": 128}
RATES: dict[Scale, float] = {"laptop": 5e-3, "gpu": 1e-3}
# Channels of a head; two blocks of 128 channels then hold 4096 numbers of state each.
HEAD = 32
# GLA is published without one.
NO_CONVOLUTION = ("gla", "attention")
LABEL, ROWS = "new rows", 1280
# One guess outside the classes asked for costs a whole class, so training has to rule it out.
STOP_AT, WATCHED_ROWS = 1.0, 512
# Per cent; the mean over all settings of a task, each the best of six runs.
PUBLISHED: dict[str, dict[str, float]] = {
    layer: dict(zip(SETTINGS["gpu"], scores, strict=True))
    for layer, scores in {
        "attention": (51.6, 29.8, 94.1, 85.2, 86.8, 99.6),
        "gla": (38.8, 6.9, 80.8, 63.3, 81.6, 88.6),
        "deltanet": (42.2, 35.7, 100.0, 52.8, 100.0, 100.0),
    }.items()
}


def cells(scale: Scale) -> list[TaskCell]:
    """Every setting and layer."""
    return [make_cell(scale, name, layer) for name in SETTINGS[scale] for layer in LAYERS[scale]]


def make_cell(scale: Scale, name: str, layer: str) -> TaskCell:
    """One model of two blocks, mixer and MLP."""
    setting, width, laptop = SETTINGS[scale][name], WIDTHS[scale], scale == "laptop"
    kind = AutoencoderCell if setting.task == "mad_compression" else TaskCell
    return kind(
        name=f"{name}-{layer}", task=setting.task, training=setting.training,
        evaluations=(Evaluation(LABEL, setting.config, ROWS),),
        model=ModelConfig(
            vocab_size=setting.config.vocab_size, hidden_size=width, num_layers=2,
            layer_types=layer, num_heads=width // HEAD, head_k_dim=HEAD, head_v_dim=HEAD,
            conv_size=0 if layer in NO_CONVOLUTION else 4, tie_embeddings=False,
        ),
        rows=setting.rows, examples=setting.examples,
        optimizer=OptimizerOptions(
            lr=RATES[scale], min_lr_ratio=1e-3, warmup_steps=50 if laptop else 0,
            weight_decay=0.1, decay_embeddings=True, beta2=0.98 if laptop else 0.999,
            clip=1.0 if laptop else 0.0,
        ),
        loop=LoopOptions(
            steps=setting.steps, dtype="float32" if laptop else "bfloat16",
            evaluate_every=setting.steps // 25 if laptop else setting.steps // 20, keep=1,
        ),
        stop_at=STOP_AT, watched_rows=WATCHED_ROWS,
    )  # fmt: skip


def by_setting(scale: Scale, results: list[Result]) -> dict[str, dict[str, Result]]:
    """The finished cells by setting and layer."""
    done = {result.name: result for result in finished(results)}
    return {
        name: {
            layer: done[f"{name}-{layer}"] for layer in LAYERS[scale] if f"{name}-{layer}" in done
        }
        for name in SETTINGS[scale]
    }


def draw(scale: Scale, results: list[Result], path: Path) -> None:
    """Accuracy in training, a panel a task; the published scores at its end."""
    panels = []
    for name, runs in by_setting(scale, results).items():
        setting = SETTINGS[scale][name]
        ours = [training_curve(layer, result) for layer, result in runs.items()]
        theirs = [
            Curve(layer, [setting.steps], [PUBLISHED[layer][name] / 100], published=True)
            for layer in runs if layer in PUBLISHED
        ]  # fmt: skip
        panels.append(
            Panel(
                ours + theirs, "step", "accuracy", title=setting.title, limits=(-0.08, 1.05),
                levels={"chance": setting.config.chance},
            )
        )  # fmt: skip
    draw_curves(panels, path, title="MAD, baseline settings")


def table(scale: Scale, results: list[Result]) -> str:
    """Ours at the baseline setting, and the published mean over all settings."""
    rows = [
        [
            SETTINGS[scale][name].title, title_of(layer), f"{accuracy(result):.1%}",
            f"{result.figures['evaluations'][LABEL]['share_right']:.2%}",
            f"{result.figures['steps']:,}", published(layer, name),
        ]
        for name, runs in by_setting(scale, results).items() for layer, result in runs.items()
    ]  # fmt: skip
    head = ["task", "layer", "accuracy", "answers right", "steps", "published mean of all settings"]
    note = (
        f"Measured on {ROWS:,} new rows. In the accuracy, the benchmark's own, every class weighs "
        "the same; one that is guessed but never is the answer counts as 0."
    )
    return "\n\n".join([markdown_table(head, rows, results), note])


def published(layer: str, name: str) -> str:
    """The score in the paper's table, if the layer is in it."""
    return f"{PUBLISHED[layer][name]:.1f} %" if layer in PUBLISHED else "-"


BOTH = [
    "The baseline setting of each task only, with one learning rate and one weight decay (0.1); a "
    "published score is the mean over 6 to 14 settings, each the best of three rates and two "
    "decays. The two do not compare number by number.",
    "One seed. Training ends early when every answer on 512 other rows is right.",
    "Heads of 32 channels in every layer. The heads and widths of the published DeltaNet are not "
    "known. Linear attention, DeltaNet and Gated DeltaNet have a convolution of 4; GLA and "
    "attention have none.",
    "RMSNorm instead of LayerNorm; the library's own initialisation; no bias in the head.",
]
EXPERIMENT = Experiment(
    name="mad", title="MAD, small tasks that tell layers apart",
    shows=(
        "Which layers recall what they read, under noise and in words of several tokens, copy what "
        "matters, memorize and compress, and how soon they learn it."
    ),
    source="DeltaNet (arXiv 2406.06484), table 1; the benchmark is arXiv 2403.17844",
    needs={
        "laptop": "6 curves of 4 minutes or less, 10 minutes on 2 cores",
        "gpu": "30 curves, 7 minutes on two H200 with --workers 30",
    },
    cells=cells, draw=draw, table=table,
    deviations={
        "laptop": [
            "Two of the six tasks; copying has 128 tokens instead of 256.",
            "64 channels instead of 128, and new rows at every step, 32 (recall) or 16 (copying), "
            "instead of 200 epochs over 12,800 rows in batches of 128.",
            "A learning rate of 0.005, where the benchmark has 0.0001 to 0.001; a warm-up of 50 "
            "steps, beta2 of 0.98, and gradients clipped at 1.",
            *BOTH,
        ],
        "gpu": [
            "50 epochs instead of 200 (memorization has 200), at a learning rate of 0.001, whose "
            "cosine goes on at every step instead of every epoch.",
            "The state is normalised before the autoencoder of compression adds positions to it.",
            *BOTH,
        ],
    },
)  # fmt: skip
