"""In-context languages: which letter may come next in words of an automaton never seen before."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deltarule.models import ModelConfig
from deltarule.tasks.regbench import Config
from deltarule.train.loop import LoopOptions
from deltarule.train.optimizer import OptimizerOptions
from experiments.experiment import Experiment, Result, Scale, finished
from experiments.figures import Curve, Panel, draw_curves, title_of
from experiments.markdown import markdown_table
from experiments.task_cell import Evaluation, TaskCell, accuracy
from experiments.training_curve import training_curve

BATCH = 32


@dataclass(frozen=True)
class Form:
    """What the two forms of the experiment differ in."""

    task: Config
    systems: tuple[str, ...]
    examples: tuple[int, ...]
    """Automata in training, one row of words each."""
    epochs: int
    watched: int
    """Automata of each evaluation in training."""
    width: int
    layers: int
    rate: float
    dtype: Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class System:
    """A layer with or without a short convolution, and its published accuracies."""

    layer: str
    conv_size: int
    published: dict[int, float]
    """Per cent by the number of examples, read off the figure to within 0.5."""

    @property
    def bare(self) -> bool:
        """Whether it lacks a convolution that it could have."""
        return self.conv_size == 0 and self.layer != "attention"

    @property
    def title(self) -> str:
        """For figure and table."""
        return f"{title_of(self.layer)}, no convolution" if self.bare else self.layer


EXAMPLES = (2_500, 5_000, 10_000, 20_000)


def system(layer: str, conv_size: int, *published: float) -> System:
    """A system whose accuracies are published at `EXAMPLES`."""
    return System(layer, conv_size, dict(zip(EXAMPLES, published, strict=False)))


SYSTEMS = {
    "attention": system("attention", 0, 92.7, 94.0, 95.0, 95.5),
    "deltanet": system("deltanet", 4, 81.3, 87.4, 88.8, 93.1),
    "deltanet-no-conv": system("deltanet", 0, 79.0, 85.1, 85.1, 92.8),
    "gated_deltanet": system("gated_deltanet", 4),
    "gla": system("gla", 4, 60.3, 85.5, 89.8, 92.7),
    "gla-no-conv": system("gla", 0, 52.5, 81.4, 89.8, 93.1),
    "linear_attention": system("linear_attention", 4),
}
FORMS: dict[Scale, Form] = {
    "laptop": Form(
        task=Config(longest_word=12), systems=("linear_attention", "attention", "deltanet"),
        examples=EXAMPLES[:1], epochs=9, watched=200, width=64, layers=2, rate=3e-3,
        dtype="float32",
    ),
    "gpu": Form(
        task=Config(),
        systems=(
            "attention", "deltanet", "deltanet-no-conv", "gated_deltanet", "gla", "gla-no-conv",
        ),
        examples=EXAMPLES[:2], epochs=25, watched=500, width=256, layers=4, rate=5e-4,
        dtype="bfloat16",
    ),
}  # fmt: skip
LABEL, ROWS = "new automata", 500


def cells(scale: Scale) -> list[TaskCell]:
    """Every number of examples and system, the longest first."""
    form = FORMS[scale]
    return [
        make_cell(form, name, examples)
        for examples in sorted(form.examples, reverse=True)
        for name in form.systems
    ]


def make_cell(form: Form, name: str, examples: int) -> TaskCell:
    """One model with two heads in each layer."""
    steps = form.epochs * (examples // BATCH)
    heads = 2
    return TaskCell(
        name=f"{name}-{examples}", task="regbench", training=form.task,
        evaluations=(Evaluation(LABEL, form.task, ROWS),),
        model=ModelConfig(
            vocab_size=form.task.vocab_size, hidden_size=form.width, num_layers=form.layers,
            layer_types=SYSTEMS[name].layer, num_heads=heads, head_k_dim=form.width // heads,
            head_v_dim=form.width // heads, conv_size=SYSTEMS[name].conv_size,
            tie_embeddings=False,
        ),
        rows=BATCH, examples=examples,
        optimizer=OptimizerOptions(
            lr=form.rate, min_lr_ratio=0.1, warmup_steps=steps // 10, weight_decay=0.1,
            decay_embeddings=True, beta2=0.999, clip=1.0,
        ),
        loop=LoopOptions(
            steps=steps, dtype=form.dtype, evaluate_every=steps // 20, save_every=steps // 4,
            keep=1,
        ),
        watched_rows=form.watched,
    )  # fmt: skip


def best(result: Result) -> float:
    """The best evaluation in training, as published models are picked by validation."""
    return max(right for _, _, right in result.figures["curve"])


def uniform(results: list[Result]) -> dict[str, float]:
    """The accuracy of guessing any letter, if there is a result to take it from."""
    done = finished(results)
    return {"any letter": done[0].figures["evaluations"][LABEL]["uniform"]} if done else {}


def draw(scale: Scale, results: list[Result], path: Path) -> None:
    """Accuracy in training, and against the number of examples beside the published ones."""
    form = FORMS[scale]
    done = {result.name: result for result in finished(results)}
    levels = uniform(results)
    panels = [
        Panel(
            [
                training_curve(
                    SYSTEMS[name].title, done[f"{name}-{examples}"], look=SYSTEMS[name].layer
                )
                for name in form.systems if f"{name}-{examples}" in done
            ],
            "step", "legal guesses", title=f"{examples:,} examples", limits=(0, 1), levels=levels,
        )
        for examples in form.examples
    ]  # fmt: skip
    published = [
        Curve(
            SYSTEMS[name].title, list(SYSTEMS[name].published),
            [value / 100 for value in SYSTEMS[name].published.values()], published=True,
            look=SYSTEMS[name].layer,
        )
        for name in form.systems
    ]  # fmt: skip
    ours = [curve for name in form.systems for curve in against_examples(form, name, done)]
    same = scale == "gpu"
    panels.append(
        Panel(
            ours + published if same else published, "training examples", "legal guesses",
            title="" if same else "As published, with longer words", log_x=True, limits=(0, 1),
            levels=levels if same else {},
        )
    )  # fmt: skip
    draw_curves(panels, path, title="In-context languages of random automata")


def against_examples(form: Form, name: str, done: dict[str, Result]) -> list[Curve]:
    """One system at every number of examples that has a result."""
    points = [(n, done[f"{name}-{n}"]) for n in form.examples if f"{name}-{n}" in done]
    if not points:
        return []
    counts, runs = zip(*points, strict=True)
    return [
        Curve(SYSTEMS[name].title, counts, [best(run) for run in runs], look=SYSTEMS[name].layer)
    ]


def table(scale: Scale, results: list[Result]) -> str:
    """Ours at each number of examples, and the published accuracies."""
    form = FORMS[scale]
    done = {result.name: result for result in finished(results)}
    shown = EXAMPLES[:2]
    head = [
        "system", *(f"ours, {n:,} examples" for n in form.examples),
        *(f"published, {n:,} examples" for n in shown),
    ]  # fmt: skip
    rows = []
    for name in form.systems:
        runs = [done.get(f"{name}-{n}") for n in form.examples]
        published = SYSTEMS[name].published
        rows.append([
            title_of(SYSTEMS[name].title),
            *("-" if run is None else f"{best(run):.1%} ({accuracy(run):.1%})" for run in runs),
            *(f"{published[n]} %" if n in published else "-" for n in shown),
        ])  # fmt: skip
    notes = [
        "The share of guesses that the automaton allows: the best evaluation in training, "
        f"on {form.watched} new automata, and in brackets the last model's, on {ROWS} others."
    ]
    notes += [
        f"A guess of any letter is right in {share:.1%}." for share in uniform(results).values()
    ]
    return "\n\n".join([markdown_table(head, rows, results), " ".join(notes)])


BOTH = [
    "One seed, one width, depth and learning rate; the published accuracies are the best of a "
    "sweep, whose choice for each system is not known.",
    "A SwiGLU of 8/3 of the width, no dropout on the embedding (the paper has 0.1), gradients "
    "clipped at 1, RMSNorm, and two heads in every layer.",
    "Ours is the best of some 20 evaluations in training, where RegBench's sweep goes by the "
    "validation loss. The last model is measured as well, for small sets are learned by heart in "
    "the end.",
]
EXPERIMENT = Experiment(
    name="regbench", title="In-context languages of random automata",
    shows=(
        "A model reads words of an automaton that it never saw, and says which letter may come "
        "next: the accuracy in training and against the number of training examples."
    ),
    source="DeltaNet (arXiv 2406.06484), figure 3; the task is RegBench (arXiv 2401.12973)",
    needs={
        "laptop": "3 curves of 2 to 4 minutes on 2 cores",
        "gpu": "12 curves, 6 minutes on one H200 with --workers 12",
    },
    cells=cells, draw=draw, table=table,
    deviations={
        "laptop": [
            "A smoke test, with no claim on the figure: words of at most 12 letters instead of 49, "
            "64 channels and 2 layers instead of 256 to 1,024 and 4 to 12, only 2,500 automata.",
            "9 epochs instead of 200 and a learning rate of 0.003 instead of 0.00025.",
            *BOTH,
        ],
        "gpu": [
            "2,500 and 5,000 automata; the paper goes on to 20,000.",
            "25 epochs instead of 200, 256 channels and 4 layers where the paper's sweep has 256 "
            "to 1,024 and 4 to 12, and a learning rate of 0.0005 where it has 0.00025.",
            "Mamba is left out; Gated DeltaNet is not in the figure.",
            *BOTH,
        ],
    },
)  # fmt: skip
