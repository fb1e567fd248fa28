"""Associative recall against the width of the model: figure 2 of DeltaNet."""

from functools import partial

from bench.markdown import markdown_table
from deltarule.tasks.mqar import Config
from experiments.experiment import Form, Result
from experiments.figures import BARE, Curve, Figure, Panel, draw_curves, in_training, title_of
from experiments.seeds import Runs, accuracy, told
from experiments.task_cell import Evaluation, TaskCell, task_cell

# Where a system with its own sizes has not two.
HEADS = {"attention": 1, "retnet": 8}
LABEL, ROWS = "new rows", 3000


def cells(form: Form) -> list[TaskCell]:
    """One model each; unless layers are their own, states are two square memories everywhere."""
    task, found = Config(**form["task"]), []
    for system in form["systems"]:
        layer = system.removesuffix(BARE)
        for width in form["widths"]:
            heads = 1 if system == "attention" else 2
            sizes = {"head_k_dim": width // heads, "head_v_dim": width // heads, "conv_size": 0}
            if form["own_layers"]:
                heads, sizes = HEADS.get(layer, 2), {"conv_size": 0} if BARE in system else {}
            model = {"hidden_size": width, "layer_types": layer, "num_heads": heads} | sizes
            found += [
                task_cell(
                    TaskCell, form, f"{system}-d{width}-lr{rate:g}-seed{seed}", task,
                    [Evaluation(LABEL, task, ROWS)],
                    seed=seed, model=model, optimizer={"lr": rate},
                )
                for rate in form.get(f"{system}_rates") or form["rates"]
                for seed in form["seeds"]
            ]  # fmt: skip
    return found


def best(results: list[Result], system: str, width: int) -> list[Result]:
    """Every seed of the learning rate that is best in the mean; none if there is no result."""
    by_rate: dict[float, list[Result]] = {}
    for result in results:
        if result.name.startswith(f"{system}-d{width}-"):
            by_rate.setdefault(result.cell["optimizer"]["lr"], []).append(result)
    return max(by_rate.values(), key=lambda runs: right(runs).mean, default=[])


def right(runs: list[Result]) -> Runs:
    return Runs([*map(accuracy, runs)])


def draw(form: Form, results: list[Result]) -> Figure:
    """Accuracy against width, and in training at the larger one; the published beside them."""
    same, task = not form["published_apart"], Config(**form["task"])
    ours, training = [], []
    widest = max(result.cell["model"]["hidden_size"] for result in results)
    for system in form["systems"]:
        runs = {width: best(results, system, width) for width in form["widths"]}
        if points := {width: right(found).values for width, found in runs.items() if found}:
            ours.append(Curve.through(system, points))
        training += [in_training(system, run) for run in runs[widest][:1]]
    published = [Curve(name, row, published=True) for name, row in form["published"].items()]
    setting = f"{task.length} tokens, {task.pairs} pairs"
    panel = partial(Panel, y="accuracy", limits=(-0.07, 1.05))
    ours_panel = partial(panel, levels={"chance": task.chance})
    panels = [
        ours_panel(ours + (published if same else []), "width", title=setting, log_x=True),
        ours_panel(training, "step", title=f"{setting}, width {widest}"),
    ]
    if not same:
        title = "As published: 512 tokens, 64 pairs"
        panels.append(panel(published, "width", title=title, log_x=True))
    return draw_curves(panels, title="Associative recall")


def table(form: Form, results: list[Result]) -> str:
    apart = form["published_apart"]
    shown = (64, 128) if apart else form["widths"]
    heads = ["system", *(f"ours, width {width}" for width in form["widths"]), "learning rates"]
    heads += [f"published, width {width}" for width in shown]
    rows = []
    for system in dict.fromkeys((*form["systems"], "mamba1")):
        runs = [best(results, system, width) for width in form["widths"]]
        rates = [f"{one[0].cell['optimizer']['lr']:g}" for one in runs if one]
        cells = [*map(entry, runs), ", ".join(dict.fromkeys(rates)) or "-"]
        published = form["published"].get(system, {})
        rows.append([title_of(system), *cells, *(told(published, n, ".0%") for n in shown)])
    note = " The published figures are of 512 tokens and 64 pairs." if apart else ""
    chance = f"Chance, one of a row's values, is {Config(**form['task']).chance:.1%}.{note}"
    return f"{markdown_table(heads, rows)}\n\n{chance}"


def entry(runs: list[Result]) -> str:
    """Mean accuracy, the range over seeds, and the steps that were taken."""
    if not runs:
        return "-"
    found = right(runs)
    steps = " and ".join(f"{one.figures['steps']:,}" for one in runs)
    spread = f" ({min(found.values):.1%} to {max(found.values):.1%})" if len(runs) > 1 else ""
    return f"{found.mean:.1%}{spread} in {steps} steps"
