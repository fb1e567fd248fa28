"""What changes how a system learns: forms of other experiments with one thing changed."""

from collections.abc import Iterator
from dataclasses import replace

from bench.markdown import markdown_table
from experiments.experiment import Form, Result, load_experiment, merged
from experiments.figures import Figure, Panel, draw_curves, in_training, title_of
from experiments.seeds import Runs
from experiments.task_cell import TaskCell


def changes(form: Form) -> Iterator[tuple[str, Form, Form]]:
    """What names begin with, the question and the change."""
    for question, asked in form["questions"].items():
        for change, made in asked["changes"].items():
            yield f"{question}-{change}-", asked, made


def cells(form: Form) -> list[TaskCell]:
    """Every change of every question, by the settings or by the model's own."""
    found = []
    for start, asked, made in changes(form):
        experiment = load_experiment(asked["experiment"])
        changed = merged(merged(experiment.forms[form["of"]], asked["form"]), made.get("form", {}))
        for cell in experiment.module.cells(changed):
            model = replace(cell.model, **made.get("model", {}))
            found.append(replace(cell, name=start + cell.name, model=model))
    return found


def runs_of(form: Form, results: list[Result]) -> Iterator[tuple[Form, Form, list[Result]]]:
    """What has run of each change, behind the question and the change."""
    for start, asked, made in changes(form):
        yield asked, made, [run for run in results if run.name.startswith(start)]


def system_of(run: Result) -> str:
    return run.cell["model"]["layer_types"][0]


def draw(form: Form, results: list[Result]) -> Figure:
    """Accuracy in training, a panel for each change and a line for each seed."""
    panels = [
        Panel(
            [in_training(system_of(run), run) for run in runs], "step",
            asked.get("unit", "accuracy"), f"{asked['short']}: {made['title']}",
            limits=asked.get("limits", (-0.05, 1.05)),
        )
        for asked, made, runs in runs_of(form, results)
        if runs
    ]  # fmt: skip
    return draw_curves(panels, title="One thing changed")


def table(form: Form, results: list[Result]) -> str:
    rows = []
    for asked, made, runs in runs_of(form, results):
        for run in runs:
            ends = "; ".join(
                f"{asked.get('unit', name)}: {one[asked['figure']]:.3f}"
                for name, one in run.figures["evaluations"].items()
            )
            horizons = [Runs(layer).each(",.0f") for layer in run.figures["horizons"]]
            steps, seed = f"{run.figures['steps']:,}", str(run.cell["loop"]["seed"])
            system = title_of(system_of(run)), made["title"]
            rows.append([asked["title"], *system, seed, ends, steps, "; ".join(horizons) or "-"])
    head = ["task", "system", "what is changed", "seed", "result", "steps", "horizons, tokens"]
    return markdown_table(head, rows)
