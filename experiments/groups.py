"""Word problems of groups against the writes for each token, and weights that are exact."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltarule.models import ModelConfig
from deltarule.tasks.groups import Config, Group, running_products
from deltarule.train.loop import LoopOptions
from deltarule.train.optimizer import OptimizerOptions
from deltarule.train.task_rows import Curriculum
from experiments.constructions import Action, Construction
from experiments.experiment import Experiment, Result, Scale, finished
from experiments.figures import Curve, Panel, draw_curves
from experiments.markdown import markdown_table
from experiments.seeds import setting
from experiments.task_cell import Evaluation, TaskCell


@dataclass(frozen=True)
class Form:
    """What the two forms of the experiment differ in."""

    groups: dict[Group, tuple[int, ...]]
    """The numbers of writes that each is tried with, eigenvalues in [-1, 1]."""
    positive: dict[Group, tuple[int, ...]]
    """Those tried with eigenvalues in [0, 1] too."""
    seeds: tuple[int, ...]
    hidden_size: int
    trained: int
    """Elements of a row at the end of the curriculum."""
    prefixes: tuple[int, ...]
    """Lengths that are tested; the last is that of the test rows."""
    rows: int
    """Of a batch."""
    steps: int
    lr: float


# The groups that train longest come first.
FORMS: dict[Scale, Form] = {
    "laptop": Form(
        groups={"S_4": (3, 2, 1), "S_3": (2, 1)}, positive={"S_3": (2, 1)}, seeds=(0, 1, 2),
        hidden_size=64, trained=32, prefixes=(4, 8, 16, 24, 32, 48, 64, 96, 128), rows=128,
        steps=600, lr=3e-3,
    ),
    "gpu": Form(
        groups={"S_5": (4, 3, 2, 1), "A_5": (4, 3, 2, 1), "S_4": (3, 2, 1), "S_3": (2, 1)},
        positive={"S_5": (4,), "S_3": (2,)}, seeds=(0, 1), hidden_size=128, trained=128,
        prefixes=(8, 16, 32, 64, 96, 128, 180, 256, 325, 400, 512), rows=512, steps=3000, lr=6e-3,
    ),
}  # fmt: skip
LABEL, ROWS = "new rows", 1000
# Rows grow from two elements on: products of few have to be learned before those of many.
FIRST_LENGTH, THRESHOLD = 2, 0.25
# Of 256 rows of the test's length, which are not those of the table.
STOP_AT = 0.9999
# Sequence accuracy on S_5 by length and writes, read off the figure of the authors' code.
PUBLISHED: dict[int, dict[int, float]] = {
    4: {128: 1.0, 180: 1.0, 325: 0.5, 500: 0.0},
    3: {50: 0.0},
    2: {10: 0.0},
    1: {10: 0.0},
}
EXACT: tuple[tuple[Group, Action], ...] = (
    ("S_2", "permutations"), ("S_3", "permutations"), ("S_4", "permutations"),
    ("S_4", "rotations"), ("A_5", "rotations"), ("S_5", "permutations"),
)  # fmt: skip


@dataclass(frozen=True)
class ExactCell:
    """A layer whose weights are not trained, on one long row."""

    name: str
    group: Group
    action: Action
    tokens: int = 20_000
    seed: int = 0

    def run(self, folder: Path, device: torch.device) -> dict[str, Any]:
        """Multiply in float64 on the CPU, and compare with the table of products."""
        construction = Construction(self.group, self.action)
        order = len(construction.matrices)
        words = np.random.default_rng(self.seed).integers(order, size=self.tokens)
        run = construction.run(words)
        right = run.products == running_products(self.group, words[None])[0]
        return {
            "n_steps": construction.n_steps,
            "accuracy": float(right.mean()),
            "error": run.error,
        }


def cells(scale: Scale) -> list[TaskCell | ExactCell]:
    """Every group, number of writes and seed, and the exact weights."""
    form = FORMS[scale]
    settings = [(group, n, 2.0) for group, steps in form.groups.items() for n in steps]
    settings += [(group, n, 1.0) for group, steps in form.positive.items() for n in steps]
    trained = [make_cell(form, *one, seed) for one in settings for seed in form.seeds]
    return [
        *trained,
        *(ExactCell(f"exact-{group}-{action}", group, action) for group, action in EXACT),
    ]


def make_cell(form: Form, group: Group, n_steps: int, beta_max: float, seed: int) -> TaskCell:
    """One layer of DeltaProduct with four heads, no convolution, no gate and no MLP."""
    size = form.hidden_size // 4
    least = 1 - int(beta_max)
    return TaskCell(
        name=f"{group}-n{n_steps}-from{least}-seed{seed}", task="groups",
        training=Config(group, form.trained),
        evaluations=(
            Evaluation(LABEL, Config(group, form.prefixes[-1]), ROWS, prefixes=form.prefixes),
        ),
        model=ModelConfig(
            vocab_size=Config(group).vocab_size, hidden_size=form.hidden_size, num_layers=1,
            layer_types="delta_product", num_heads=4, head_k_dim=size, head_v_dim=size,
            conv_size=0, mlp_size=0, output_gate=False, beta_max=beta_max, n_steps=n_steps,
        ),
        rows=form.rows,
        optimizer=OptimizerOptions(lr=form.lr, min_lr_ratio=0.05, warmup_steps=50),
        loop=LoopOptions(
            steps=form.steps, seed=seed, evaluate_every=form.steps // 20,
            save_every=form.steps // 5, keep=1,
        ),
        stop_at=STOP_AT, curriculum=Curriculum(FIRST_LENGTH, form.trained, THRESHOLD),
    )  # fmt: skip


def label_of(n_steps: int, beta_max: float) -> str:
    """What a curve or a row is called.

    Examples:
        >>> label_of(2, 1.0)
        'n = 2, [0, 1]'
    """
    return f"n = {n_steps}" if beta_max > 1 else f"n = {n_steps}, [0, 1]"


def trained_runs(results: Sequence[Result], group: Group) -> dict[str, list[Result]]:
    """Finished training runs of a group by label, every seed of each; fewest writes first."""
    runs: dict[str, list[Result]] = {}
    done = [run for run in finished(list(results)) if not run.name.startswith("exact")]
    for run in sorted(done, key=setting):
        model = run.cell["model"]
        if run.cell["training"]["group"] == group:
            runs.setdefault(label_of(model["n_steps"], model["beta_max"]), []).append(run)
    return runs


def draw(scale: Scale, results: list[Result], path: Path) -> None:
    """A panel for each group: the share of rows that are right up to each length."""
    form = FORMS[scale]
    panels = []
    for group in reversed(form.groups):
        curves = [
            by_length(label, run)
            for label, runs in trained_runs(results, group).items()
            for run in runs
        ]
        if group == "S_5":
            curves += [
                Curve(label_of(n, 2.0), list(points), list(points.values()), published=True)
                for n, points in PUBLISHED.items()
            ]
        panels.append(
            Panel(
                curves, "elements", "rows right up to here", title=group, log_x=True,
                limits=(-0.02, 1.05), marks={"longest in training": form.trained},
            )
        )  # fmt: skip
    draw_curves(panels, path, title="Word problems of groups", columns=2)


def by_length(label: str, run: Result) -> Curve:
    """One seed: seeds differ in kind, some solve a group that others do not."""
    lengths, shares = zip(*run.figures["evaluations"][LABEL]["prefixes"], strict=True)
    return Curve(label, lengths, shares)


def reached(run: Result) -> int:
    """The greatest length up to which at least half of the rows are right; 0 for none."""
    prefixes = run.figures["evaluations"][LABEL]["prefixes"]
    return max((n for n, share in prefixes if share >= 0.5), default=0)


def share_at(run: Result, length: int) -> float:
    """Of rows that are right up to a length."""
    return float(dict(map(tuple, run.figures["evaluations"][LABEL]["prefixes"]))[length])


def table(scale: Scale, results: list[Result]) -> str:
    """What was learned, and what exact weights do."""
    form = FORMS[scale]
    longest = form.prefixes[-1]
    rows = [
        [
            group, label, *(
                ", ".join(f"{share_at(run, n):.3f}" for run in runs)
                for n in (form.trained, longest)
            ),
            ", ".join(str(reached(run)) for run in runs),
        ]
        for group in reversed(form.groups)
        for label, runs in trained_runs(results, group).items()
    ]  # fmt: skip
    head = [
        "group", "writes", f"rows right up to {form.trained}", f"up to {longest}",
        "length with half of the rows right",
    ]  # fmt: skip
    exact = {run.name: run for run in finished(results)}
    exact_rows = [
        [
            group, action, str(run.figures["n_steps"]), f"{run.cell['tokens']:,}",
            f"{run.figures['accuracy']:.1%}", f"{run.figures['error']:.0e}",
        ]
        for group, action in EXACT
        if (run := exact.get(f"exact-{group}-{action}"))
    ]  # fmt: skip
    exact_head = ["group", "acts by", "writes", "tokens", "right", "largest error"]
    return "\n\n".join(
        [
            "Learned, each seed:", markdown_table(head, rows, results),
            "Exact weights, without training, in float64:", markdown_table(exact_head, exact_rows),
            REMARK,
        ]
    )  # fmt: skip


REMARK = (
    "Where no range is named, eigenvalues lie in [-1, 1]. Published, on S_5 with rows of 128: four "
    "writes are right up to 180 elements, half of the rows up to 325 and none up to 500; one and "
    "two writes fail by 10, three by 50. Exact weights show what a layer can hold, training what "
    "it finds."
)
BOTH = [
    "No MLP and no output gate; four heads of a quarter of the channels.",
    "Rows grow from 2 elements to the trained length, by one after each step with a loss below "
    "0.25 nats; the paper's code has this as an option.",
    "New rows at every step instead of 100 epochs over 100,000; float32 instead of bfloat16; "
    "gradients clipped at 1, weight decay 0.1.",
    "Training ends early once 99.99 % of the products are right on 256 rows of the test's length, "
    "not those of the table; the paper's code stops at 99 %.",
    "The token that begins a row has no label.",
]
EXPERIMENT = Experiment(
    name="groups", title="Word problems of groups",
    shows=(
        "To follow a product of permutations a layer must reflect its state: each write for a "
        "token is one reflection, so harder groups need more of them."
    ),
    source="DeltaProduct (arXiv 2502.10297), word problems of S_3, S_4, A_5 and S_5",
    needs={
        "laptop": "21 cells of a minute and 6 of seconds, 10 minutes on 2 cores",
        "gpu": "30 cells, 4 minutes on two H200 with --workers 30",
    },
    cells=cells, draw=draw, table=table,
    deviations={
        "laptop": [
            "S_3 and S_4 alone, rows of 32 in training and 128 in the test instead of 128 and 512.",
            "64 channels instead of 128, and at most 600 steps of 128 rows at a rate of 0.003.",
            *BOTH,
        ],
        "gpu": [
            "At most 3,000 steps of 512 rows at a rate of 0.006, not 4,900 of 2,048 at 0.001.",
            *BOTH,
        ],
    },
)  # fmt: skip
