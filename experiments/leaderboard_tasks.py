"""The tasks of the leaderboard, each at one setting for every system."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from deltarule.models import ModelConfig
from deltarule.tasks import groups, modular_arithmetic, mqar, parity
from deltarule.train.loop import LoopOptions
from deltarule.train.optimizer import OptimizerOptions
from experiments import mad
from experiments.experiment import Scale
from experiments.task_cell import Evaluation, TaskCell
from experiments.text_cell import TextCell
from experiments.text_setting import text_cell, text_model

LABEL = "new rows"


class Column(NamedTuple):
    """A task at one setting."""

    title: str
    setting: str
    """What a model trains on and is tested on, for a reader."""
    cell: Callable[[str], TaskCell | TextCell]
    """From a system to its training run at the first rate and seed."""
    rates: tuple[float, ...]
    """Tried with the first seed."""
    seeds: tuple[int, ...]
    """The first one, and those that the best rate runs with as well."""


def labelled(
    task: str, training: Any, tested: Any, *, width: int, heads: int, layers: int, rows: int,
    steps: int, mlp_size: int | None = None, dtype: Literal["float32", "bfloat16"] = "float32",
) -> Callable[[str], TaskCell]:  # fmt: skip
    """Training runs on a task, whose model has all that is not named at the system's default."""

    def cell(system: str) -> TaskCell:
        return TaskCell(
            name=system, task=task, training=training,
            evaluations=(Evaluation(LABEL, tested, 1000),),
            model=ModelConfig(
                vocab_size=training.vocab_size, hidden_size=width, num_layers=layers,
                layer_types=system, num_heads=heads,
                tie_embeddings=False, mlp_size=mlp_size,
            ),
            rows=rows,
            optimizer=OptimizerOptions(min_lr_ratio=0.05, warmup_steps=steps // 10, beta2=0.98),
            loop=LoopOptions(
                steps=steps, dtype=dtype, evaluate_every=steps // 6, save_every=steps, keep=1
            ),
            stop_at=0.999,
        )  # fmt: skip

    return cell


def mad_cell(setting: str) -> Callable[[str], TaskCell]:
    """The model and the rows of the experiment `mad`, for fewer steps and with warm-up.

    Convolution and sizes of heads are the system's own.
    """

    def cell(system: str) -> TaskCell:
        base = mad.make_cell("gpu", setting, system)
        model = replace(base.model, conv_size=None, head_k_dim=None, head_v_dim=None)
        steps = min(base.loop.steps, STEPS)
        optimizer = replace(base.optimizer, warmup_steps=steps // 10, beta2=0.98, clip=1.0)
        loop = replace(base.loop, steps=steps, evaluate_every=steps // 5, save_every=steps)
        return replace(base, model=model, optimizer=optimizer, loop=loop)

    return cell


# Of MAD's tasks and of recall in the GPU form.
STEPS, RATE = 800, 2e-3
RECALL = mqar.Config(length=32, pairs=6, vocab_size=32)
LAPTOP = {
    "mqar": Column(
        "Associative recall",
        "6 pairs of 31 words in rows of 32, new rows in training and test; 2 layers",
        labelled(
            "mqar", RECALL, RECALL, width=32, heads=2, layers=2, mlp_size=0, rows=64, steps=300,
        ), (1e-2,), (0,),
    ),
    "parity": Column(
        "Parity",
        "trained on rows of 16 bits, tested on 17 to 64; 1 layer",
        labelled(
            "parity", parity.Config(16, 16, every_position=True), parity.Config(17, 64), width=32,
            heads=2, layers=1, mlp_size=0, rows=64, steps=300,
        ), (1e-2,), (0, 1, 2),
    ),
}  # fmt: skip
# Of the GPU form: the settings of the other experiments, but for the systems' own convolutions.
RATES, SEEDS = (1e-3, 4e-3), (0, 1, 2)
LONG_RECALL = mqar.Config(length=128, pairs=16, vocab_size=64)
PARITY, ARITHMETIC = parity.Config(3, 40), modular_arithmetic.Config(3, 40)
GPU = {
    **{
        f"mad-{name}": Column(
            one.title,
            f"MAD's baseline, {min(one.steps, STEPS):,} steps of 128 rows; 2 layers of width 128",
            mad_cell(name), (RATE,), SEEDS[:1],
        )
        for name, one in mad.SETTINGS["gpu"].items()
    },
    "mqar": Column(
        "Associative recall",
        f"16 pairs of 64 words in rows of 128, {STEPS:,} steps of 128 new rows; 2 layers of width "
        "128 without MLP",
        labelled(
            "mqar", LONG_RECALL, LONG_RECALL, width=128, heads=4, layers=2, mlp_size=0, rows=128,
            steps=STEPS, dtype="bfloat16",
        ), (RATE,), SEEDS[:1],
    ),
    "parity": Column(
        "Parity", "trained on rows of 3 to 40 bits, tested on 40 to 256; 2 layers",
        labelled(
            "parity", PARITY, parity.Config(40, 256), width=128, heads=4, layers=2, rows=256,
            steps=4000,
        ), RATES, SEEDS,
    ),
    "arithmetic": Column(
        "Modular arithmetic", "trained on rows of 3 to 40 places, tested on 40 to 256; 3 layers",
        labelled(
            "modular_arithmetic", ARITHMETIC, modular_arithmetic.Config(40, 256), width=128,
            heads=4, layers=3, rows=256, steps=4000,
        ), RATES, SEEDS,
    ),
    "S_3": Column(
        "Products in S_3", "trained on rows of 32 elements, tested on 128; 1 layer",
        labelled(
            "groups", groups.Config("S_3", 32), groups.Config("S_3", 128), width=128, heads=4,
            layers=1, mlp_size=0, rows=256, steps=3000,
        ), RATES, SEEDS,
    ),
    "language": Column(
        "Text, bits per byte", "30 M parameters, 600 steps of 32 rows of 512 bytes; 8 layers",
        lambda system: text_cell(system, text_model(system, "large"), "large", 0), RATES, (0,),
    ),
}  # fmt: skip
COLUMNS: dict[Scale, dict[str, Column]] = {"laptop": LAPTOP, "gpu": GPU}
