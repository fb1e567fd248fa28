"""The experiments by name."""

import importlib
from pathlib import Path

from deltarule.nearest import check_known
from experiments.experiment import Experiment
from experiments.words import read_settings, read_words

NAMES = """
    leaderboard mqar memory language extrapolation ablation speedup throughput mad regbench
    state-tracking groups niah causes
"""
# Each module has `cells`, `draw` and `table`, and `TIMED` if its cells take times; its words and
# settings lie beside it. They are imported on demand.
EXPERIMENTS = {name: f"experiments.{name.replace('-', '_')}" for name in NAMES.split()}


def load_experiment(name: str) -> Experiment:
    """The experiment of a name."""
    check_known("NAME", name, EXPERIMENTS)
    module = importlib.import_module(EXPERIMENTS[name])
    folder = Path(module.__file__ or "").parent
    words = read_words(name, folder)
    forms = read_settings(name, folder)
    return Experiment(
        name=name, words=words,
        forms={scale: form | {"published": words.published} for scale, form in forms.items()},
        make=module.cells, draw=module.draw, table=module.table,
        timed=getattr(module, "TIMED", False),
    )  # fmt: skip
