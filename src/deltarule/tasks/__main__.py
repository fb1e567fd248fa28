"""`python -m deltarule.tasks NAME` prints one row of a task, and without a name the tasks."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from deltarule.tasks import TASKS, load_task

# Sizes at which a row can be read, where that of the defaults is too long or shows no noise.
SIZES: dict[str, dict[str, Any]] = {
    "mad_recall": {"length": 48, "noise_vocab_size": 6, "noise": 0.2},
    "mad_fuzzy_recall": {"length": 64},
    "mad_copying": {"length": 64, "copied": 8},
    "mad_memorization": {"length": 16},
    "regbench": {"longest_word": 12},
}


def main(words: Sequence[str]) -> None:
    """Print one row of the task that is named, or what each task is about."""
    parser = argparse.ArgumentParser("python -m deltarule.tasks", description="Print one row.")
    parser.add_argument("name", nargs="?", help="the task; without it, they are listed")
    name = parser.parse_args(words).name
    try:
        print(example(name) if name else overview())
    except ValueError as error:
        parser.error(str(error))


def example(name: str) -> str:
    task = load_task(name)
    return task.show(task.Config(**SIZES.get(name, {})), np.random.default_rng(0))


def overview() -> str:
    """Each task's name and what it is about, the first line of its file."""
    width = max(map(len, TASKS))
    about = {name: (load_task(name).__doc__ or "").partition("\n")[0] for name in TASKS}
    return "\n".join(f"{name:{width}}  {line}" for name, line in about.items())


if __name__ == "__main__":
    main(sys.argv[1:])
