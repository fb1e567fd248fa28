"""In-context languages: which letter may come next in words of an automaton never seen before."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.markdown import markdown_table
from deltarule.tasks.regbench import Config
from experiments.experiment import Experiment, Result
from experiments.figures import Curve, Panel, draw_curves, title_of
from experiments.settings import Form, read_settings
from experiments.task_cell import Evaluation, TaskCell, accuracy, in_training, task_cell
from experiments.words import Scale, read_words


class System(NamedTuple):
    """A layer with or without a short convolution, and its published accuracies."""

    layer: str
    conv_size: int
    published: dict[int, float]
    """Per cent by the number of examples, read off the figure to within 0.5."""

    @property
    def title(self) -> str:
        """For figure and table; only what could have a convolution can lack one."""
        bare = self.conv_size == 0 and self.layer != "attention"
        return f"{title_of(self.layer)}, no convolution" if bare else self.layer


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
FORMS = read_settings("regbench")
LABEL, ROWS = "new automata", 500


def cells(scale: Scale) -> list[TaskCell]:
    """Every number of examples and system, the longest first."""
    form = FORMS[scale]
    return [
        make_cell(form, name, examples)
        for examples in sorted(form["examples"], reverse=True)
        for name in form["systems"]
    ]


def make_cell(form: Form, name: str, examples: int) -> TaskCell:
    """One model, trained for whole epochs."""
    task, steps = Config(**form["task"]), form["epochs"] * (examples // form["cell"]["rows"])
    return task_cell(
        form,
        f"{name}-{examples}",
        task,
        [Evaluation(LABEL, task, ROWS)],
        model={"layer_types": SYSTEMS[name].layer, "conv_size": SYSTEMS[name].conv_size},
        optimizer={"warmup_steps": steps // 10},
        loop={"steps": steps, "evaluate_every": steps // 20, "save_every": steps // 4},
        cell={"examples": examples},
        kind=TaskCell,
    )


def best(result: Result) -> float:
    """The best evaluation in training, as published models are picked by validation."""
    return max(right for _, _, right in result.figures["curve"])


def uniform(results: list[Result]) -> float:
    """The accuracy of guessing any letter."""
    share: float = results[0].figures["evaluations"][LABEL]["uniform"]
    return share


def draw(scale: Scale, results: list[Result], path: Path) -> None:
    """Accuracy in training, and against the number of examples beside the published ones."""
    form, done = FORMS[scale], {result.name: result for result in results}
    training: dict[int, list[Curve]] = {count: [] for count in form["examples"]}
    ours, published = [], []
    for name in form["systems"]:
        system = SYSTEMS[name]
        runs = {n: run for n in form["examples"] if (run := done.get(f"{name}-{n}"))}
        for count, run in runs.items():
            training[count].append(in_training(system.title, run, system.layer))
        if points := {count: best(run) for count, run in runs.items()}:
            ours.append(Curve(system.title, [*points], [*points.values()], look=system.layer))
        shares = {count: percent / 100 for count, percent in system.published.items()}
        published.append(Curve.of_paper(system.title, shares, look=system.layer))
    panel = partial(Panel, y="legal guesses", limits=(0, 1))
    levels = {"any letter": uniform(results)}
    panels = [
        panel(curves, "step", title=f"{count:,} examples", levels=levels)
        for count, curves in training.items()
    ]
    against = partial(panel, x="training examples", log_x=True)
    if scale == "gpu":
        panels.append(against(ours + published, levels=levels))
    else:
        panels.append(against(published, title="As published, with longer words"))
    draw_curves(panels, path, title="In-context languages of random automata")


def table(scale: Scale, results: list[Result]) -> str:
    """Ours at each number of examples, and the published accuracies."""
    form, shown = FORMS[scale], EXAMPLES[:2]
    done = {result.name: result for result in results}
    head = ["system", *(f"ours, {n:,} examples" for n in form["examples"])]
    head += [f"published, {n:,} examples" for n in shown]
    rows = []
    for name in form["systems"]:
        runs = [done.get(f"{name}-{n}") for n in form["examples"]]
        published = SYSTEMS[name].published
        ours = ["-" if run is None else f"{best(run):.1%} ({accuracy(run):.1%})" for run in runs]
        theirs = [f"{published[n]} %" if n in published else "-" for n in shown]
        rows.append([title_of(SYSTEMS[name].title), *ours, *theirs])
    watched = form["cell"]["watched_rows"]
    note = (
        "The share of guesses that the automaton allows: the best evaluation in training, "
        f"on {watched} new automata, and in brackets the last model's, on {ROWS} others. "
        f"A guess of any letter is right in {uniform(results):.1%}."
    )
    return f"{markdown_table(head, rows)}\n\n{note}"


EXPERIMENT = Experiment(
    name="regbench", words=read_words("regbench"), cells=cells, draw=draw, table=table
)
