"""Rows have RULER's format, and the value asked for is the one that was hidden."""

import re
import uuid

import numpy as np
import pytest

from deltarule.models.bytes import BEGIN, decode
from deltarule.tasks.batch import NO_LABEL
from deltarule.tasks.niah import DEPTHS, KEYS, NOISE, SENTENCE, Config, generate, read_prose

# RULER's template for one key and one value, with the needle in the context.
FORMAT = re.compile(
    r"A special magic (?P<kind>number|uuid) is hidden within the following text\. Make sure to "
    r"memorize it\. I will quiz you about the (?P=kind) afterwards\.\n"
    r"(?P<before>.*?)One of the special magic (?P=kind)s for (?P<key>\S+) is: (?P<value>\S+)\."
    r"(?P<after>.*)\n"
    r"What is the special magic (?P=kind) for (?P=key) mentioned in the provided text\? "
    r"The special magic (?P=kind) for (?P=key) mentioned in the provided text is (?P<again>\S+)",
    re.DOTALL,
)
CONFIGS = [
    Config("noise", "number", 512),
    Config("prose", "number", 1024),
    Config("prose", "uuid", 1024, split="validation"),
]


def texts(config, rows=20):
    """Each row as text, the value that is its label included."""
    tokens, labels = generate(config, np.random.default_rng(0), rows)
    for row, answers in zip(tokens, labels, strict=True):
        last = np.flatnonzero(answers != NO_LABEL)[-1]
        yield decode([*row[: last + 1], answers[last]])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rows_have_the_format_of_the_original_and_labels_are_the_value_byte_for_byte(config):
    tokens, labels = generate(config, np.random.default_rng(0), rows=20)
    for text, row, answers in zip(texts(config), tokens, labels, strict=True):
        found = FORMAT.fullmatch(text)
        assert found["kind"] == config.value
        assert found["key"] in KEYS
        if config.value == "number":
            assert re.fullmatch(r"[1-9]\d{6}", found["value"])
        else:
            assert uuid.UUID(found["value"]).version == 4
        assert decode(answers[answers != NO_LABEL]) == found["value"] == found["again"]
        assert row[0] == BEGIN
        assert (row[len(text) :] == BEGIN).all()
        assert len(text) <= config.length


def test_noise_fills_the_row_and_the_needle_stands_before_any_of_it():
    config, places = Config("noise", length=1024), []
    for text in texts(config, rows=400):
        found = FORMAT.fullmatch(text)
        assert len(text) > config.length - len(NOISE) - 1
        lines = [*found["before"].splitlines(), "", *found["after"].splitlines()[1:]]
        assert set(lines) == {NOISE, ""}
        places.append(lines.index(""))
    # Never after the last: RULER draws the index among the sentences.
    counts = np.bincount(places)
    assert len(counts) == len(lines) - 1
    assert counts.min() > 0.6 * counts.mean()


@pytest.mark.parametrize("split", ["training", "validation"])
def test_prose_is_sentences_in_their_order(split):
    joined = " ".join(read_prose(split).sentences)
    for text in texts(Config("prose", length=1024, split=split)):
        found = FORMAT.fullmatch(text)
        assert f"{found['before']}{found['after'].strip()}".strip() in joined
        assert len(text) > 1024 - 203


def test_no_sentence_is_in_both_parts_each_is_plain_and_depths_are_forty_percentages():
    assert len(DEPTHS) == 40
    assert DEPTHS[[0, 1, -1]].tolist() == [0, 3, 100]
    training, validation = (read_prose(split) for split in ("training", "validation"))
    assert all(SENTENCE.fullmatch(s.encode()) for s in validation.sentences)
    assert len(" ".join(training.sentences)) == training.starts[-1] - 1 > 100_000
    assert len(" ".join(validation.sentences)) == validation.starts[-1] - 1 > 10_000
    assert training.sentences != validation.sentences


def test_every_byte_can_be_a_label():
    config = Config("prose", length=600, every_byte=True)
    tokens, labels = generate(config, np.random.default_rng(0), rows=5)
    for row, answers in zip(tokens, labels, strict=True):
        end = (answers != NO_LABEL).sum()
        assert (answers[: end - 1] == row[1:end]).all()
        assert (answers[end:] == NO_LABEL).all()


def test_any_is_each_of_both():
    drawn = texts(Config("any", "any", length=1024), rows=40)
    assert len({(NOISE in text, FORMAT.fullmatch(text)["kind"]) for text in drawn}) == 4


def test_short_rows_leave_out_the_instructions():
    text = next(texts(Config("noise", length=256, instructions=False)))
    assert re.fullmatch(r"One of .*\nThe grass .* again\. The special magic number for .*", text)


def test_the_length_that_is_asked_for_holds_one_piece_of_noise():
    with pytest.raises(ValueError) as refused:
        Config(length=10)
    least = int(re.search(r"at least (\d+)", str(refused.value))[1])
    tokens, _ = generate(Config(length=least), np.random.default_rng(0), rows=100)
    assert all("The grass is green." in decode(row) for row in tokens)
