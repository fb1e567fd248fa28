"""What every task of the table promises: rows of a generator's state, and sizes that hold one."""

import numpy as np
import pytest

from deltarule.tasks import TASKS, load_task
from deltarule.tasks.batch import NO_LABEL

every_task = pytest.mark.parametrize("task", TASKS)
# By task and the field that is named: sizes that leave no room, or are no task.
REFUSED = {
    "mqar": [
        ("pairs", {"pairs": 0}),
        ("length", {"length": 31}),
        ("vocab_size", {"vocab_size": 17}),
        ("power_a", {"power_a": 0.0}),
    ],
    "mad_recall": [
        ("length", {"length": 127}),
        ("vocab_size", {"vocab_size": 17, "noise_vocab_size": 16}),
        ("noise_vocab_size", {"noise_vocab_size": -1}),
        ("noise_vocab_size", {"noise": 0.2}),
        ("noise", {"noise": 1.0, "noise_vocab_size": 1}),
    ],
    "mad_fuzzy_recall": [
        ("motif", {"motif": 0}),
        ("length", {"length": 12}),
        ("vocab_size", {"vocab_size": 6}),
    ],
    "mad_copying": [
        ("copied", {"copied": 0}),
        ("length", {"length": 33}),
        ("vocab_size", {"vocab_size": 2}),
    ],
    "mad_memorization": [("length", {"length": 31}), ("vocab_size", {"vocab_size": 2})],
    "mad_compression": [("length", {"length": 1}), ("vocab_size", {"vocab_size": 1})],
    "regbench": [
        ("edges", {"edges": 0}),
        ("letters", {"letters": 3}),
        ("letters", {"letters": 62}),
        ("states", {"states": 3}),
        ("fewest_words", {"fewest_words": 0}),
        ("most_words", {"most_words": 9}),
        ("longest_word", {"longest_word": 0}),
    ],
    **{
        name: [("shortest", {"shortest": 2}), ("longest", {"shortest": 9, "longest": 8})]
        for name in ("parity", "modular_arithmetic", "bracket_arithmetic")
    },
    "groups": [("group", {"group": "D_4"}), ("length", {"length": 0})],
    "niah": [
        ("haystack", {"haystack": "essay"}),
        ("value", {"value": "word"}),
        ("length", {"length": 300}),
    ],
}


def test_every_task_refuses_something():
    assert set(REFUSED) == set(TASKS)


@pytest.mark.parametrize(
    ("task", "name", "sizes"), [(task, *row) for task, rows in REFUSED.items() for row in rows]
)
def test_sizes_that_leave_no_room_are_refused(task, name, sizes):
    with pytest.raises(ValueError, match=f"^{name} must"):
        load_task(task).Config(**sizes)


@every_task
def test_rows_and_examples_follow_the_generators_state(task):
    module = load_task(task)
    config = module.Config()
    first, again, other = (
        module.generate(config, np.random.default_rng(seed), 4) for seed in (3, 3, 4)
    )
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert (first.tokens != other.tokens).any()
    assert first.tokens.shape == first.labels.shape
    assert (first.labels != NO_LABEL).any(1).all()
    shown = [module.show(config, np.random.default_rng(seed)) for seed in (3, 3, 4)]
    assert shown[0] == shown[1] != shown[2]


# What the generators of xLSTM's experiments draw with seed 7 for rows of 3 to 12 places. Each row's
# last token is the answer.
ORIGINAL = {
    "parity": ["22222221112", "221121211", "1122", "221"],
    "modular_arithmetic": ["928171947", "93748", "8192745", "848"],
}


@pytest.mark.parametrize("task", ORIGINAL)
def test_rows_are_those_of_the_original_token_for_token(task):
    module = load_task(task)
    tokens, labels = module.generate(module.Config(3, 12), np.random.default_rng(7), rows=4)
    for row, answers, original in zip(tokens, labels, ORIGINAL[task], strict=True):
        read = len(original) - 1
        assert "".join(map(str, row[:read])) == original[:-1]
        assert (row[read:] == 0).all()
        assert answers[read - 1] == int(original[-1])
        assert (np.delete(answers, read - 1) == NO_LABEL).all()


def test_an_expression_needs_five_places():
    with pytest.raises(ValueError, match="longest must be 5 or more, got 4"):
        load_task("bracket_arithmetic").Config(3, 4)
