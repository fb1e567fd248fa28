"""Synthetic tasks, one file each. Every one of them has

    Config(...)                      sizes; a ValueError names one that does not fit the others
    generate(config, rng, rows)      a `Batch`: tokens and labels, int64; rng is all that is random
    show(config, rng)                one row to read
    measure(config, batch, guesses)  further figures of the likeliest tokens [rows, length]
    THREADS                          how many may draw rows at once, each with its own rng

of which the fourth stands only where accuracy says too little, and the last only where rows are
drawn by NumPy: threads of Python's own loops hold each other up.
"""

import importlib
from types import ModuleType

from deltarule.nearest import check_known

# Modules of this package, imported on demand: the text of one needs the models.
TASKS = (
    "mqar", "mad_recall", "mad_fuzzy_recall", "mad_copying", "mad_memorization", "mad_compression",
    "regbench", "parity", "modular_arithmetic", "bracket_arithmetic", "groups", "niah",
)  # fmt: skip


def load_task(name: str) -> ModuleType:
    check_known("name", name, TASKS)
    return importlib.import_module(f"{__name__}.{name}")
