"""The experiments by name."""

import importlib

from deltarule.nearest import check_known
from experiments.experiment import Experiment

NAMES = """
    leaderboard mqar memory language extrapolation ablation speedup throughput mad regbench
    state-tracking groups niah
"""
# Each module has `EXPERIMENT`; they are imported on demand.
EXPERIMENTS = {name: f"experiments.{name.replace('-', '_')}" for name in NAMES.split()}


def load_experiment(name: str) -> Experiment:
    """The experiment of a name.

    Raises:
        ValueError: There is none of that name.

    Examples:
        >>> load_experiment("mqar").name
        'mqar'
    """
    check_known("NAME", name, EXPERIMENTS)
    experiment: Experiment = importlib.import_module(EXPERIMENTS[name]).EXPERIMENT
    return experiment
