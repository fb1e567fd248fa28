"""Parity and modular arithmetic, with eigenvalues in [0, 1] and in [-1, 1]."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from deltarule.models import CausalLM, ModelConfig
from deltarule.tasks import bracket_arithmetic, modular_arithmetic, parity
from deltarule.train.loop import LoopOptions
from deltarule.train.optimizer import OptimizerOptions
from experiments.experiment import Experiment, Result, Scale, finished
from experiments.figures import Curve, Panel, draw_curves
from experiments.markdown import markdown_table
from experiments.seeds import setting
from experiments.signed_mamba2 import with_signs
from experiments.task_cell import Evaluation, TaskCell

SEEDS = (0, 1, 2)
# As in the paper: trained on rows of at most 40 places, tested on 40 to 256.
TRAINED, TESTED = (3, 40), (40, 256)
LABEL, ROWS = "lengths 40 to 256", 8192
LENGTHS, ROWS_OF_LENGTH = (32, 64, 128, 256), 1024
LIMITS = (-0.08, 1.05)


class System(NamedTuple):
    """A layer with one range of eigenvalues."""

    layer: str
    title: str
    signed: bool
    """Whether eigenvalues reach -1."""


SYSTEMS = {
    "deltanet01": System("deltanet", "DeltaNet [0, 1]", signed=False),
    "deltanet11": System("deltanet", "DeltaNet [-1, 1]", signed=True),
    "mamba01": System("mamba2", "Mamba-2 [0, 1]", signed=False),
    "mamba11": System("mamba2", "Mamba-2 [-1, 1]", signed=True),
}


class Task(NamedTuple):
    """One column of the table, and the published scaled accuracies, the best of three runs."""

    title: str
    config: type[parity.Config] | type[modular_arithmetic.Config] | type[bracket_arithmetic.Config]
    published: dict[str, float]


TASKS = {
    "parity": Task(
        "Parity", parity.Config,
        {"deltanet01": 0.017, "deltanet11": 1.0, "mamba01": 0.0, "mamba11": 1.0,
         "Transformer": 0.022, "mLSTM": 0.087, "sLSTM": 1.0},
    ),
    "modular_arithmetic": Task(
        "Modular arithmetic without brackets", modular_arithmetic.Config,
        {"deltanet01": 0.314, "deltanet11": 0.971, "mamba01": 0.095, "mamba11": 0.241,
         "Transformer": 0.031, "mLSTM": 0.040, "sLSTM": 0.787},
    ),
    "bracket_arithmetic": Task(
        "Modular arithmetic with brackets", bracket_arithmetic.Config,
        {"deltanet01": 0.137, "deltanet11": 0.200, "mamba01": 0.092, "mamba11": 0.136,
         "Transformer": 0.025, "mLSTM": 0.034, "sLSTM": 0.173},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """What the two forms of the experiment differ in."""

    tasks: tuple[str, ...]
    hidden_size: int
    num_layers: int
    """Of parity; arithmetic has one more."""
    conv_size: int
    mlp_size: int
    every_bit: bool
    """Whether parity is asked for after every bit of rows of one length."""
    rows: int
    """Of a batch."""
    steps: int
    optimizer: OptimizerOptions
    dtype: Literal["float32", "bfloat16"]
    stop_at: float | None


FORMS: dict[Scale, Form] = {
    "laptop": Form(
        tasks=("parity",), hidden_size=64, num_layers=1, conv_size=0, mlp_size=0, every_bit=True,
        rows=256, steps=500, dtype="float32", stop_at=None,
        optimizer=OptimizerOptions(
            lr=3e-3, min_lr_ratio=0.05, warmup_steps=50, weight_decay=0.0
        ),
    ),
    # The batch of the paper's code.
    "gpu": Form(
        tasks=("bracket_arithmetic", "modular_arithmetic", "parity"), hidden_size=128,
        num_layers=2, conv_size=4, mlp_size=512, every_bit=False, rows=256, steps=6000,
        dtype="bfloat16", stop_at=1.0,
        optimizer=OptimizerOptions(lr=1e-3, min_lr_ratio=1e-3, warmup_steps=500, beta2=0.999),
    ),
    "published": Form(
        tasks=("modular_arithmetic", "bracket_arithmetic", "parity"), hidden_size=128,
        num_layers=2, conv_size=4, mlp_size=512, every_bit=False, rows=1024, steps=100_000,
        dtype="bfloat16", stop_at=1.0,
        optimizer=OptimizerOptions(lr=1e-3, min_lr_ratio=1e-3, warmup_steps=1000, beta2=0.999),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StateCell(TaskCell):
    """A cell whose Mamba-2 layers may have signs."""

    signed: bool = False
    """Give Mamba-2 eigenvalues in [-1, 1]; of DeltaNet, `model.beta_max` says it."""

    def build(self) -> CausalLM:
        """The model, its layers exchanged for signed ones if there are such."""
        model = super().build()
        return with_signs(model) if self.signed else model


def cells(scale: Scale) -> list[StateCell]:
    """Every task, system and seed."""
    form = FORMS[scale]
    return [
        make_cell(form, task, name, seed)
        for task in form.tasks
        for seed in SEEDS
        for name in SYSTEMS
    ]


def make_cell(form: Form, task: str, name: str, seed: int) -> StateCell:
    """One model; both layers have four heads with keys of hidden_size / 4 channels."""
    config, system = TASKS[task].config, SYSTEMS[name]
    training = parity.Config(33, 33, every_position=True) if form.every_bit else config(*TRAINED)
    evaluations = [Evaluation(LABEL, config(*TESTED), ROWS)]
    evaluations += [Evaluation(f"length {n}", config(n, n), ROWS_OF_LENGTH) for n in LENGTHS]
    decay = 0.0 if task == "parity" else 0.1
    delta = system.layer == "deltanet"
    return StateCell(
        name=f"{task}-{name}-seed{seed}", task=task, training=training,
        evaluations=tuple(evaluations), signed=system.signed and not delta,
        model=ModelConfig(
            vocab_size=training.vocab_size, hidden_size=form.hidden_size,
            num_layers=form.num_layers + (task != "parity"), layer_types=system.layer, num_heads=4,
            head_k_dim=form.hidden_size // 4, head_v_dim=form.hidden_size // 4,
            conv_size=form.conv_size, mlp_size=form.mlp_size, tie_embeddings=False,
            beta_max=(2.0 if system.signed else 1.0) if delta else None,
        ),
        rows=form.rows, optimizer=replace(form.optimizer, weight_decay=decay),
        loop=LoopOptions(
            steps=form.steps, seed=seed, dtype=form.dtype, evaluate_every=form.steps // 20,
            save_every=form.steps // 5, keep=1,
        ),
        stop_at=form.stop_at,
    )  # fmt: skip


def scaled(result: Result, label: str = LABEL) -> float:
    """Accuracy from 0 for guessing to 1, as the paper has it."""
    accuracy = float(result.figures["evaluations"][label]["accuracy"])
    chance = TASKS[result.cell["task"]].config().chance
    return (accuracy - chance) / (1 - chance)


def runs_of(results: list[Result], task: str, name: str) -> list[Result]:
    """All seeds of one system on one task that did not fail."""
    return [result for result in finished(results) if setting(result) == f"{task}-{name}"]


def draw(scale: Scale, results: list[Result], path: Path) -> None:
    """For each task the accuracy by length, and beside it that of the table, with the published."""
    panels = []
    for task in reversed(FORMS[scale].tasks):
        present = {name: runs for name in SYSTEMS if (runs := runs_of(results, task, name))}
        panels.append(
            Panel(
                [by_length(name, run) for name, runs in present.items() for run in runs],
                "length of the row",
                "scaled accuracy", title=TASKS[task].title, log_x=True, limits=LIMITS,
                marks={"longest in training": 33 if FORMS[scale].every_bit else TRAINED[1]},
            )
        )  # fmt: skip
        table_panel = [
            curve for place, name in enumerate(SYSTEMS)
            for curve in in_table(task, name, place, present.get(name, []))
        ]  # fmt: skip
        panels.append(
            Panel(
                table_panel, LABEL, "scaled accuracy", title="best of three, lengths 40 to 256",
                ticks=[system.title.replace(" [", "\n[") for system in SYSTEMS.values()],
                limits=LIMITS,
            )
        )  # fmt: skip
    draw_curves(panels, path, title="State tracking", columns=2)


def by_length(name: str, run: Result) -> Curve:
    """One seed: seeds differ in kind, some solve a task that others do not."""
    values = [scaled(run, f"length {n}") for n in LENGTHS]
    system = SYSTEMS[name]
    return Curve(system.title, LENGTHS, values, look=system.layer)


def in_table(task: str, name: str, place: int, runs: list[Result]) -> list[Curve]:
    """The best of the seeds, the range of them, and the published value."""
    title, base = SYSTEMS[name].title, SYSTEMS[name].layer
    values = [scaled(run) for run in runs]
    published = Curve(title, [place], [TASKS[task].published[name]], published=True, look=base)
    ours = Curve(
        title, [place], [max(values, default=0)], low=[min(values, default=0)],
        high=[max(values, default=0)], look=base,
    )  # fmt: skip
    return [ours, published] if values else [published]


def table(scale: Scale, results: list[Result]) -> str:
    """Scaled accuracy of every system, ours beside the published."""
    rows = []
    for task in reversed(FORMS[scale].tasks):
        for name, value in TASKS[task].published.items():
            title = SYSTEMS[name].title if name in SYSTEMS else name
            values = sorted(scaled(run) for run in runs_of(results, task, name))
            ours = ["-", "-"]
            if values:
                ours = [f"{values[-1]:.3f}", ", ".join(f"{x:.3f}" for x in values)]
            rows.append([TASKS[task].title, title, *ours, f"{value:.3f}"])
    head = ["task", "system", "ours, best", "ours, each seed", "published, best of 3"]
    return f"{markdown_table(head, rows, results)}\n\n{REMARK}"


REMARK = (
    "Scaled accuracy is (accuracy - chance) / (1 - chance) of the one answer of rows of 40 to 256 "
    "places, 0 for guessing. The published column is that of the slides: theirs with brackets has "
    "sums and differences only, no products, as its code multiplies only when told to. With "
    "products the final paper gives 0.194 and 0.260 for DeltaNet, 0.123 and 0.116 for Mamba. The "
    "published Mamba is the first one, ours Mamba-2."
)
BOTH = [
    "Mamba-2 stands where the paper has Mamba. Its eigenvalues in [-1, 1] are 2 a - 1 for its "
    "decay a; the sign is folded into what is written and read, as there is one decay a head. "
    "Mamba's sign of every entry of the state cannot be folded so.",
    "Transformer, mLSTM and sLSTM are not run.",
    "The code and the paper differ in the number of layers, the batch and the clipping; ours has "
    "the paper's where both fit.",
]
EXPERIMENT = Experiment(
    name="state-tracking", title="State tracking with negative eigenvalues",
    shows=(
        "Whether an odd number of bits was set is a state that flips: with eigenvalues in [0, 1] "
        "rows longer than the trained ones are guessed, with [-1, 1] most are solved."
    ),
    source="Grazzi et al. (arXiv 2411.12537), table 2, as printed in the slides' figure 4",
    needs={
        "laptop": "12 cells of a minute, 7 minutes on 2 cores",
        "gpu": "36 cells, 6 minutes on two H200 with --workers 30",
        "published": "36 cells, an estimated 4 hours on one H200 with --workers 12, in pieces "
        "of any length; --only modular_arithmetic- first",
    },
    cells=cells, draw=draw, table=table,
    deviations={
        "laptop": [
            "Parity alone; modular arithmetic needs a GPU.",
            "Rows of 32 bits with the parity asked for after each bit, instead of rows of 2 to 39 "
            "bits and one answer: a fortieth of the rows is enough. The test is the paper's.",
            "One layer of 64 channels without convolution and MLP, 500 steps of 256 rows at a rate "
            "of 0.003.",
            *BOTH,
        ],
        "gpu": [
            "6,000 steps of 256 rows instead of 100,000 of 1,024; the paper's code has 256 rows, "
            "and 20,000 steps for parity.",
            "One learning rate, 0.001, instead of the best of four.",
            "Parity ends early once every row of a small test is right.",
            *BOTH,
        ],
        "published": [
            "One learning rate, 0.001, instead of the best of four.",
            "Training ends early once every row of a small test is right.",
            *BOTH,
        ],
    },
)  # fmt: skip
