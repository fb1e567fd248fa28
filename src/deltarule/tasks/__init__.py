"""Synthetic tasks: one file each, with a configuration, `generate`, and one example to read."""

import importlib
from types import ModuleType

from deltarule.nearest import check_known

# Modules of this package, each with a `Config`, `generate(config, rng, rows)` and
# `show(config, rng)`. They are imported on demand, as the text of one needs the models.
TASKS = (
    "mqar",
    "mad_recall",
    "mad_fuzzy_recall",
    "mad_copying",
    "mad_memorization",
    "mad_compression",
    "regbench",
    "parity",
    "modular_arithmetic",
    "bracket_arithmetic",
    "groups",
    "niah",
)


def load_task(name: str) -> ModuleType:
    """The module of a task.

    Raises:
        ValueError: There is no such task.

    Examples:
        >>> load_task("mqar").Config().pairs
        8
    """
    check_known("name", name, TASKS)
    return importlib.import_module(f"{__name__}.{name}")
