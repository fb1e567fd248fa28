"""In-context languages: which letter may come next in words of an automaton never seen before."""

from functools import partial

from bench.markdown import markdown_table
from deltarule.tasks.regbench import Config
from experiments.experiment import Form, Result
from experiments.figures import BARE, Curve, Figure, Panel, draw_curves, in_training, title_of
from experiments.seeds import accuracy, first_evaluation
from experiments.task_cell import Evaluation, TaskCell, task_cell

LABEL, ROWS = "new automata", 500


def cells(form: Form) -> list[TaskCell]:
    """Every number of examples and system, the longest first."""
    counts = sorted(form["examples"], reverse=True)
    return [make_cell(form, name, examples) for examples in counts for name in form["systems"]]


def make_cell(form: Form, name: str, examples: int) -> TaskCell:
    """One model, trained for whole epochs."""
    task, steps = Config(**form["task"]), form["epochs"] * (examples // form["cell"]["rows"])
    bare = name == "attention" or name.endswith(BARE)
    return task_cell(
        TaskCell, form, f"{name}-{examples}", task, [Evaluation(LABEL, task, ROWS)],
        model={"layer_types": name.removesuffix(BARE), "conv_size": 0 if bare else 4},
        optimizer={"warmup_steps": steps // 10},
        loop={"steps": steps, "evaluate_every": steps // 20, "save_every": steps // 4},
        cell={"examples": examples},
    )  # fmt: skip


def best(result: Result) -> float:
    """The best evaluation in training, as published models are picked by validation."""
    return max(right for _, _, right in result.figures["curve"])


def runs_of(form: Form, results: list[Result], name: str) -> dict[int, Result]:
    """What has run of a system, by the number of examples."""
    done = {result.name: result for result in results}
    return {n: done[f"{name}-{n}"] for n in form["examples"] if f"{name}-{n}" in done}


def draw(form: Form, results: list[Result]) -> Figure:
    training: dict[int, list[Curve]] = {count: [] for count in form["examples"]}
    ours, published = [], []
    for name in form["systems"]:
        runs = runs_of(form, results, name)
        for count, run in runs.items():
            training[count].append(in_training(name, run))
        if points := {count: best(run) for count, run in runs.items()}:
            ours.append(Curve(name, points))
        theirs = form["published"].get(name, {})
        shares = {count: percent / 100 for count, percent in theirs.items()}
        published.append(Curve(name, shares, published=True))
    panel = partial(Panel, y="legal guesses", limits=(0, 1))
    levels = {"any letter": first_evaluation(results[0])["uniform"]}
    panels = [
        panel(curves, "step", title=f"{count:,} examples", levels=levels)
        for count, curves in training.items()
    ]
    against = partial(panel, x="training examples", log_x=True)
    if form["published_apart"]:
        panels.append(against(published, title="As published, with longer words"))
    else:
        panels.append(against(ours + published, levels=levels))
    return draw_curves(panels, title="In-context languages of random automata")


def table(form: Form, results: list[Result]) -> str:
    shown, rows = (2_500, 5_000), []
    head = ["system", *(f"ours, {n:,} examples" for n in form["examples"])]
    head += [f"published, {n:,} examples" for n in shown]
    for name in form["systems"]:
        runs, published = runs_of(form, results, name), form["published"].get(name, {})
        told = {n: f"{best(run):.1%} ({accuracy(run):.1%})" for n, run in runs.items()}
        theirs = [f"{published[n]} %" if n in published else "-" for n in shown]
        rows.append([title_of(name), *(told.get(n, "-") for n in form["examples"]), *theirs])
    watched, any_letter = form["cell"]["watched_rows"], first_evaluation(results[0])["uniform"]
    note = (
        "The share of guesses that the automaton allows: the best evaluation in training, "
        f"on {watched} new automata, and in brackets the last model's, on {ROWS} others. "
        f"A guess of any letter is right in {any_letter:.1%}."
    )
    return f"{markdown_table(head, rows)}\n\n{note}"
