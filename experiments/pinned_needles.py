"""The task `niah` in the prose of the pinned text: the same rows on every machine."""

from functools import cache

import numpy as np

from deltarule.tasks import niah
from deltarule.tasks.batch import Batch
from deltarule.tasks.prose import Prose, Split, prose_of
from experiments.pinned_text import read_pinned_text


@cache
def pinned_prose(split: Split) -> Prose:
    """The docstrings' sentences of one part of the pinned text."""
    return prose_of(read_pinned_text().documents, split)


def generate(config: niah.Config, rng: np.random.Generator, rows: int) -> Batch:
    return niah.generate(config, rng, rows, pinned_prose)
