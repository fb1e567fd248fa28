"""Synthetic tasks: one file each, with a configuration, `generate`, and one example to read."""

import importlib
from types import ModuleType

# Each module has a `Config`, `generate(config, rng, rows)` and `show(config, rng)`, and prints an
# example when run. They are imported on demand, so that `python -m deltarule.tasks.NAME` works.
TASKS = {
    "mqar": "deltarule.tasks.mqar",
    "mad_recall": "deltarule.tasks.mad_recall",
    "mad_fuzzy_recall": "deltarule.tasks.mad_fuzzy_recall",
    "mad_copying": "deltarule.tasks.mad_copying",
    "mad_memorization": "deltarule.tasks.mad_memorization",
    "mad_compression": "deltarule.tasks.mad_compression",
    "regbench": "deltarule.tasks.regbench",
    "parity": "deltarule.tasks.parity",
    "modular_arithmetic": "deltarule.tasks.modular_arithmetic",
    "bracket_arithmetic": "deltarule.tasks.bracket_arithmetic",
    "groups": "deltarule.tasks.groups",
    "niah": "deltarule.tasks.niah",
}


def load_task(name: str) -> ModuleType:
    """The module of a task.

    Raises:
        ValueError: There is no such task.

    Examples:
        >>> load_task("mqar").Config().pairs
        8
    """
    if name not in TASKS:
        raise ValueError(f"name must be one of {', '.join(TASKS)}, got {name!r}")
    return importlib.import_module(TASKS[name])
