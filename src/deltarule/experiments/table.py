"""The experiments by name."""

import importlib

from deltarule.experiments.experiment import Experiment

# Each module has `EXPERIMENT`; they are imported on demand.
EXPERIMENTS = {
    "mqar": "deltarule.experiments.mqar",
    "memory": "deltarule.experiments.memory",
    "language": "deltarule.experiments.language",
    "extrapolation": "deltarule.experiments.extrapolation",
    "ablation": "deltarule.experiments.ablation",
    "speedup": "deltarule.experiments.speedup",
    "throughput": "deltarule.experiments.throughput",
    "mad": "deltarule.experiments.mad",
    "regbench": "deltarule.experiments.regbench",
    "state-tracking": "deltarule.experiments.state_tracking",
    "groups": "deltarule.experiments.groups",
    "niah": "deltarule.experiments.niah",
}


def load_experiment(name: str) -> Experiment:
    """The experiment of a name.

    Raises:
        ValueError: There is none of that name.

    Example:
        >>> load_experiment("mqar").name
        'mqar'
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"NAME must be one of {', '.join(EXPERIMENTS)}, got {name!r}")
    experiment: Experiment = importlib.import_module(EXPERIMENTS[name]).EXPERIMENT
    return experiment
