"""The memories are those of the papers, and hold what mathematics says that they hold."""

import numpy as np
import pytest
import torch

from experiments import memory
from experiments.experiment import read_settings
from experiments.memory import Memory, MemoryCell, recall

CPU = torch.device("cpu")


def by_hand(rule, written):
    """The recurrence of each rule, one pair at a time, in numpy."""
    keys, values, asked = (x[0].numpy() for x in written[:3])
    width = keys.shape[1]
    state = np.zeros((width, width))
    if rule == "mesa":
        return asked @ np.linalg.solve(
            keys.T @ keys + memory.REGULARIZER * np.eye(width), keys.T @ values
        )
    for k, v in zip(keys, values, strict=True):
        if rule in ("retnet", "gated_deltanet"):
            state = state * (1 - 2.0**-5)
        if "deltanet" in rule:
            state = state - np.outer(state @ k, k)
        state = state + np.outer(v, k)
    return asked @ state.T


@pytest.mark.parametrize("rule", read_settings("memory")["laptop"]["rules"])
@pytest.mark.parametrize("condition", memory.CONDITIONS)
def test_the_library_remembers_what_the_recurrence_says(rule, condition):
    written = Memory(*(part[None] for part in memory.written(condition, 20, 8, seed=0)))
    answers = recall(rule, written)[0].numpy()
    assert np.abs(answers - by_hand(rule, written)).max() < 1e-9


def test_the_error_of_a_sum_is_the_number_of_other_pairs_over_the_width():
    cell = MemoryCell("linear_attention", width=16, pairs=(8, 32), seeds=tuple(range(40)))
    error = np.array(cell.run(None, CPU)["random"]["error"]).mean(1)
    assert error == pytest.approx([7 / 16, 31 / 16], rel=0.05)


def test_what_is_found_and_what_is_old():
    cell = MemoryCell("deltanet", width=16, pairs=(4,), seeds=(0, 1))
    figures = cell.run(None, CPU)
    assert len(figures["by_age"]) == 2 * 16
    assert figures["by_age"][0] < 1e-20 < figures["by_age"][-1]
    assert np.array(figures["overwritten"]["found"]).shape == (1, 2)
    # A sum holds both values of a key, and an answer is as near to one as to the other.
    summed = MemoryCell("linear_attention", width=64, pairs=(4,), seeds=tuple(range(50)))
    found = np.mean(summed.run(None, CPU)["overwritten"]["found"])
    assert found == pytest.approx(0.5, abs=0.15)
    assert np.mean(figures["random"]["found"]) == 1.0
