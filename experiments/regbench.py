"""In-context languages: which letter may come next in words of an automaton never seen before."""

from functools import partial
from pathlib import Path

from bench.markdown import markdown_table
from deltarule.tasks.regbench import Config
from experiments.experiment import Result
from experiments.figures import BARE, Curve, Panel, draw_curves, title_of
from experiments.task_cell import Evaluation, TaskCell, accuracy, in_training, task_cell
from experiments.words import Form

LABEL, ROWS = "new automata", 500


def cells(form: Form) -> list[TaskCell]:
    """Every number of examples and system, the longest first."""
    return [
        make_cell(form, name, examples)
        for examples in sorted(form["examples"], reverse=True)
        for name in form["systems"]
    ]


def make_cell(form: Form, name: str, examples: int) -> TaskCell:
    """One model, trained for whole epochs."""
    task, steps = Config(**form["task"]), form["epochs"] * (examples // form["cell"]["rows"])
    bare = name == "attention" or name.endswith(BARE)
    return task_cell(
        form, f"{name}-{examples}", task, [Evaluation(LABEL, task, ROWS)],
        model={"layer_types": name.removesuffix(BARE), "conv_size": 0 if bare else 4},
        optimizer={"warmup_steps": steps // 10},
        loop={"steps": steps, "evaluate_every": steps // 20, "save_every": steps // 4},
        cell={"examples": examples}, kind=TaskCell,
    )  # fmt: skip


def best(result: Result) -> float:
    """The best evaluation in training, as published models are picked by validation."""
    return max(right for _, _, right in result.figures["curve"])


def uniform(results: list[Result]) -> float:
    """The accuracy of guessing any letter."""
    return results[0].figures["evaluations"][LABEL]["uniform"]


def draw(form: Form, results: list[Result], path: Path) -> None:
    """Accuracy in training, and against the number of examples beside the published ones."""
    done = {result.name: result for result in results}
    training: dict[int, list[Curve]] = {count: [] for count in form["examples"]}
    ours, published = [], []
    for name in form["systems"]:
        runs = {n: run for n in form["examples"] if (run := done.get(f"{name}-{n}"))}
        for count, run in runs.items():
            training[count].append(in_training(name, run))
        if points := {count: best(run) for count, run in runs.items()}:
            ours.append(Curve(name, [*points], [*points.values()]))
        theirs = form["published"].get(name, {})
        shares = {count: percent / 100 for count, percent in theirs.items()}
        published.append(Curve.of_paper(name, shares))
    panel = partial(Panel, y="legal guesses", limits=(0, 1))
    levels = {"any letter": uniform(results)}
    panels = [
        panel(curves, "step", title=f"{count:,} examples", levels=levels)
        for count, curves in training.items()
    ]
    against = partial(panel, x="training examples", log_x=True)
    if form["published_apart"]:
        panels.append(against(published, title="As published, with longer words"))
    else:
        panels.append(against(ours + published, levels=levels))
    draw_curves(panels, path, title="In-context languages of random automata")


def table(form: Form, results: list[Result]) -> str:
    """Ours at each number of examples, and the published accuracies."""
    shown, done = (2_500, 5_000), {result.name: result for result in results}
    head = ["system", *(f"ours, {n:,} examples" for n in form["examples"])]
    head += [f"published, {n:,} examples" for n in shown]
    rows = []
    for name in form["systems"]:
        runs = [done.get(f"{name}-{n}") for n in form["examples"]]
        published = form["published"].get(name, {})
        ours = ["-" if run is None else f"{best(run):.1%} ({accuracy(run):.1%})" for run in runs]
        theirs = [f"{published[n]} %" if n in published else "-" for n in shown]
        rows.append([title_of(name), *ours, *theirs])
    watched = form["cell"]["watched_rows"]
    note = (
        "The share of guesses that the automaton allows: the best evaluation in training, "
        f"on {watched} new automata, and in brackets the last model's, on {ROWS} others. "
        f"A guess of any letter is right in {uniform(results):.1%}."
    )
    return f"{markdown_table(head, rows)}\n\n{note}"
