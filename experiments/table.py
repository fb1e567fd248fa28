"""The experiments by name."""

import importlib

from deltarule.nearest import check_known
from experiments.experiment import Experiment

# Each module has `EXPERIMENT`; they are imported on demand.
EXPERIMENTS = {
    "leaderboard": "experiments.leaderboard",
    "mqar": "experiments.mqar",
    "memory": "experiments.memory",
    "language": "experiments.language",
    "extrapolation": "experiments.extrapolation",
    "ablation": "experiments.ablation",
    "speedup": "experiments.speedup",
    "throughput": "experiments.throughput",
    "mad": "experiments.mad",
    "regbench": "experiments.regbench",
    "state-tracking": "experiments.state_tracking",
    "groups": "experiments.groups",
    "niah": "experiments.niah",
}


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
