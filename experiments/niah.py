"""Needles in haystacks of repeated sentences and of prose, past the length that was trained."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Literal

from deltarule.models import ModelConfig
from deltarule.tasks.niah import Config, Haystack, Value
from deltarule.train.loop import LoopOptions
from deltarule.train.optimizer import OptimizerOptions
from deltarule.train.task_rows import Curriculum
from experiments import pinned_needles
from experiments.experiment import Experiment, Result, Scale, finished
from experiments.figures import Curve, Panel, draw_curves, title_of
from experiments.markdown import markdown_table
from experiments.pinned_text import SHA256
from experiments.seeds import setting
from experiments.task_cell import Evaluation, TaskCell

# Neither decay nor erase, one of them, both.
SYSTEMS = ("linear_attention", "mamba2", "deltanet", "gated_deltanet")
# Those with decays, which also run with the papers' draw of them.
GATED = ("mamba2", "gated_deltanet")
NEEDLES: dict[str, tuple[Haystack, Value]] = {
    "S-NIAH-1": ("noise", "number"),
    "S-NIAH-2": ("prose", "number"),
    "S-NIAH-3": ("prose", "uuid"),
}
# Percent of 500 samples right, by Llama-2 tokens in thousands.
PUBLISHED: dict[str, dict[str, dict[int, float]]] = {
    "S-NIAH-1": {
        "deltanet": {1: 97.4, 2: 96.8, 4: 99.0, 8: 98.8},
        "mamba2": {1: 99.2, 2: 98.8, 4: 65.4, 8: 30.4},
        "gated_deltanet": {1: 98.4, 2: 88.4, 4: 91.4, 8: 91.8},
    },
    "S-NIAH-2": {
        "deltanet": {1: 98.4, 2: 45.6, 4: 18.6, 8: 14.4},
        "mamba2": {1: 99.4, 2: 98.8, 4: 56.2, 8: 17.0},
        "gated_deltanet": {1: 100.0, 2: 99.8, 4: 92.2, 8: 29.6},
    },
    "S-NIAH-3": {
        "deltanet": {1: 85.2, 2: 47.0, 4: 22.4},
        "mamba2": {1: 64.4, 2: 47.6, 4: 4.6},
        "gated_deltanet": {1: 86.6, 2: 84.2, 4: 27.6},
    },
}


@dataclass(frozen=True, kw_only=True)
class NeedleCell(TaskCell):
    """One small model, and needles in pinned prose."""

    text: str = SHA256
    """That the prose is of."""

    def rows_of(self) -> ModuleType:
        """The task in the prose of every other machine."""
        return pinned_needles


@dataclass(frozen=True)
class Form:
    """What the two forms of the experiment differ in."""

    needles: tuple[str, ...]
    training: Config
    lengths: tuple[int, ...]
    """Of the test, the first as in training."""
    tested: int
    """Rows of each needle and length."""
    seeds: tuple[int, ...]
    hidden_size: int
    num_heads: int
    rows: int
    """Of a batch."""
    steps: int
    lr: float
    dtype: Literal["float32", "bfloat16"]
    norm_eps: float
    longest_horizon: float | None = None
    """In tokens, of the heads of gated systems; None is the papers' draw."""
    drawn_seeds: tuple[int, ...] = ()
    """Of further runs of `GATED`, which start by the papers' draw."""
    curriculum: Curriculum | None = None
    """Rows as short as the instructions allow at first: a state that forgets learns on those."""


FORMS: dict[Scale, Form] = {
    "laptop": Form(
        needles=("S-NIAH-1", "S-NIAH-2"), lengths=(256, 512, 1024, 2048, 4096), tested=100,
        training=Config("any", "number", length=256, instructions=False), seeds=(0,),
        hidden_size=64, num_heads=2, rows=16, steps=1200, lr=6e-3, dtype="float32",
        norm_eps=1e-2,
    ),
    "gpu": Form(
        needles=tuple(NEEDLES), lengths=(1024, 2048, 4096, 8192), tested=500,
        training=Config("any", "any", length=1024), seeds=(0, 1, 2, 3, 4),
        hidden_size=256, num_heads=4, norm_eps=1e-5, longest_horizon=1024, drawn_seeds=(0, 1, 2),
        rows=32, steps=3000, lr=3e-3, dtype="bfloat16", curriculum=Curriculum(512, 1024, 1.0),
    ),
}  # fmt: skip
HEAD_SIZE = 64


def cells(scale: Scale) -> list[NeedleCell]:
    """Every system and seed."""
    form = FORMS[scale]
    drawn = replace(form, longest_horizon=None)
    spread = [make_cell(form, system, seed) for seed in form.seeds for system in SYSTEMS]
    return spread + [
        replace(cell, name=f"{system}-drawn-seed{seed}")
        for seed in form.drawn_seeds
        for system in GATED
        for cell in [make_cell(drawn, system, seed)]
    ]


def make_cell(form: Form, system: str, seed: int) -> NeedleCell:
    """One model; each state is of num_heads square memories of 64 channels in both layers."""
    evaluations = [
        Evaluation(label_of(needle, length), tested(form, needle, length), form.tested)
        for length in form.lengths
        for needle in form.needles
    ]
    return NeedleCell(
        name=f"{system}-seed{seed}", task="niah", training=form.training,
        evaluations=tuple(evaluations),
        model=ModelConfig(
            vocab_size=form.training.vocab_size, hidden_size=form.hidden_size, num_layers=2,
            layer_types=system, num_heads=form.num_heads, head_k_dim=HEAD_SIZE,
            head_v_dim=HEAD_SIZE, conv_size=4, mlp_size=0, norm_eps=form.norm_eps,
            longest_horizon=form.longest_horizon if system in GATED else None,
        ),
        rows=form.rows, watched_rows=64,
        optimizer=OptimizerOptions(lr=form.lr, min_lr_ratio=0.05, warmup_steps=50),
        loop=LoopOptions(
            steps=form.steps, seed=seed, dtype=form.dtype, evaluate_every=form.steps // 24,
            save_every=form.steps // 6, keep=1,
        ),
        curriculum=form.curriculum,
    )  # fmt: skip


def tested(form: Form, needle: str, length: int) -> Config:
    """Rows of one needle and length, in prose that training never sees."""
    haystack, value = NEEDLES[needle]
    instructions = form.training.instructions
    return Config(haystack, value, length, instructions=instructions, split="validation")


def label_of(needle: str, length: int) -> str:
    """The key of an evaluation.

    Examples:
        >>> label_of("S-NIAH-1", 1024)
        'S-NIAH-1, 1024'
    """
    return f"{needle}, {length}"


def shares(runs: list[Result], needle: str, length: int) -> list[float]:
    """Percent of rows whose value is right to the last byte, of each seed."""
    figures = [run.figures["evaluations"][label_of(needle, length)] for run in runs]
    return [100 * float(one["sequence_accuracy"]) for one in figures]


def runs_of(results: list[Result], system: str) -> list[Result]:
    """All seeds of a system that did not fail."""
    return [result for result in finished(results) if setting(result) == system]


def draw(scale: Scale, results: list[Result], path: Path) -> None:
    """Ours by length above, the published below: of other models and in other tokens."""
    form = FORMS[scale]
    ours = [
        Panel(
            [curve for system in SYSTEMS for curve in by_length(form, results, system, needle)],
            "bytes", "values right, %", title=f"{needle}, ours", log_x=True, limits=(-3, 105),
            marks={"trained": form.lengths[0]},
        )
        for needle in form.needles
    ]  # fmt: skip
    published = [
        Panel(
            [
                Curve(system, [1024 * n for n in points], list(points.values()), published=True)
                for system, points in PUBLISHED[needle].items()
            ],
            "Llama-2 tokens", "values right, %", title=f"{needle}, published", log_x=True,
            limits=(-3, 105),
        )
        for needle in form.needles
    ]  # fmt: skip
    draw_curves([*ours, *published], path, title="Needles in haystacks", columns=len(form.needles))


def by_length(form: Form, results: list[Result], system: str, needle: str) -> list[Curve]:
    """A curve for each seed, as they differ in kind."""
    return [
        Curve(system, form.lengths, [shares([run], needle, n)[0] for n in form.lengths])
        for run in runs_of(results, system)
    ]


def table(scale: Scale, results: list[Result]) -> str:
    """Ours at each length, and the published values."""
    form, rows = FORMS[scale], []
    for needle in form.needles:
        for system in SYSTEMS:
            runs = runs_of(results, system)
            ours = [", ".join(f"{x:.1f}" for x in shares(runs, needle, n)) for n in form.lengths]
            published = PUBLISHED[needle].get(system, {})
            theirs = [f"{published[n]:.1f}" if n in published else "-" for n in (1, 2, 4, 8)]
            rows.append([needle, title_of(system), *(x or "-" for x in ours), *theirs])
    head = ["needle", "system", *(f"{n:,} bytes" for n in form.lengths)]
    head += [f"published, {n}K" for n in (1, 2, 4, 8)]
    parts = [markdown_table(head, rows, results), starts(form, results), REMARK]
    return "\n\n".join(part for part in parts if part)


def starts(form: Form, results: list[Result]) -> str:
    """What each run of a gated system started with, and where it ended; empty without such runs."""
    needle, length = form.needles[0], form.lengths[0]
    rows = [
        [title_of(setting(run).removesuffix("-drawn")),
         "the papers' draw" if "-drawn" in run.name else f"spread to {form.longest_horizon:,}",
         run.name.rpartition("seed")[2],
         "; ".join(", ".join(f"{x:,.0f}" for x in layer) for layer in run.figures["horizons"]),
         f"{shares([run], needle, length)[0]:.1f}"]
        for system in GATED for kind in (system, f"{system}-drawn")
        for run in runs_of(results, kind) if run.figures.get("horizons")
    ]  # fmt: skip
    head = ["system", "heads start", "seed", "horizons in tokens, layer by layer"]
    head += [f"{needle}, {length:,} bytes"]
    return markdown_table(head, rows) if rows else ""


REMARK = (
    "Percent of rows whose value is right to the last byte, each seed. This is an analogue: our "
    "models are trained on needles from scratch and read bytes; the published ones, of 1.3 B "
    "parameters, are language models that were never shown a needle and read Llama-2 tokens. A "
    "gate that is trained on needles can learn to keep them, so nothing here contradicts the paper "
    "where a system does better."
)
BOTH = [
    "Small models trained from scratch on the task, where the paper tests language models of 1.3 B "
    "parameters trained on 100 B tokens; the loss is that of the value's bytes alone.",
    "Bytes instead of Llama-2 tokens, so that a length holds about a quarter of the text.",
    "The prose is that of the docstrings of CPython 3.11.7's library, the same bytes on every "
    "machine, not the essays of RULER, which are under copyright.",
    "Keys are drawn from 4,488 pairs of our own adjectives and nouns, not from wonderwords.",
    "Rows are filled with whole sentences by counting bytes; RULER searches the length in steps. "
    "An answer counts if it is right from its first byte on; RULER's may stand anywhere.",
    "Linear attention, without decay and erase, is not in the paper.",
]
EXPERIMENT = Experiment(
    name="niah", title="Needle in a haystack",
    shows=(
        "What a state still holds of one number when the text goes on for far longer than in "
        "training, with decay, with erase, with both and with neither."
    ),
    source="Gated DeltaNet (arXiv 2412.06464), table of S-NIAH; the task is RULER's",
    needs={
        "laptop": "4 cells of 4 to 5 minutes, 10 minutes on 2 cores",
        "gpu": "26 cells, an estimated 8 minutes on one H200 with --workers 20; 15, in other prose",
    },
    cells=cells, draw=draw, table=table,
    deviations={
        "laptop": [
            "S-NIAH-1 and S-NIAH-2 alone, rows of 256 bytes in training and up to 4,096 in the "
            "test; the opening and the question are left out, the needle and the reply stay.",
            "100 rows each instead of 500.",
            *BOTH,
        ],
        "gpu": [
            "3,000 steps of 32 rows in training, of 512 bytes at first and one more after every "
            "step whose loss is below 1 nat, to 1,024; up to 8,192 bytes in the test.",
            *BOTH,
        ],
    },
)  # fmt: skip
