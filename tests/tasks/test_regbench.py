"""Random automata, their words, and which letters are legal."""

import numpy as np

from deltarule.tasks import regbench
from deltarule.tasks.batch import NO_LABEL
from deltarule.tasks.regbench import PADDING, Config, automata, generate, measure, speak

PAPER = Config()


def test_automata_have_the_papers_sizes():
    tables = automata(PAPER, np.random.default_rng(0), rows=3000)
    assert tables.shape == (3000, 12, 18)
    edges = (tables >= 0).sum(axis=2)
    assert np.abs(np.bincount(edges.ravel(), minlength=4)[1:] / edges.size - 1 / 3).max() < 0.01
    states = tables.max(axis=(1, 2)) + 1
    alphabet = (tables >= 0).any(axis=1).sum(axis=1)
    assert states.min() == 4
    assert states.max() == 12
    assert alphabet.max() <= 18
    letters = (tables >= 0).sum(axis=(0, 1)) / edges.sum()
    assert np.abs(letters - 1 / 18).max() < 0.004
    for table in tables[:300]:
        for state, row in enumerate(table):
            targets = row[row >= 0].tolist()
            assert len(set(targets)) == len(targets)
            assert state not in targets


def test_words_walk_their_automaton_and_legal_says_what_it_allows():
    rng = np.random.default_rng(0)
    tables = automata(PAPER, rng, rows=60)
    tokens, labels, legal = speak(PAPER, rng, tables)
    assert tokens.shape == labels.shape == legal.shape == (60, PAPER.length)
    for table, row, answers, bits in zip(tables, tokens, labels, legal, strict=True):
        end = int((row == PADDING).argmax())
        assert (row[end:] == PADDING).all()
        state = table[0, row[0] - 1]
        for t in range(end):
            following = row[t + 1] if t + 1 < end else answers[t]
            if following == PAPER.bar:
                assert answers[t] == NO_LABEL
                assert bits[t] == 0
                state = 0
                continue
            assert answers[t] == following
            allowed = [token for token in range(20) if bits[t] >> token & 1]
            assert allowed == (np.flatnonzero(table[state] >= 0) + 1).tolist()
            state = table[state, following - 1]
            assert state >= 0
        # The last letter is a label; nothing is asked for after it.
        assert (answers[end:] == NO_LABEL).all()
        words = split(np.append(row[:end], answers[end - 1]))
        assert 10 <= len(words) <= 19
        assert max(map(len, words)) <= 49
        assert min(map(len, words)) >= 1


def split(sequence):
    return "".join(chr(96 + token) if token <= 18 else "|" for token in sequence).split("|")


def test_words_have_the_papers_numbers_and_lengths():
    tokens, labels, legal = generate(PAPER, np.random.default_rng(1), rows=3000)
    bars = (tokens == PAPER.bar).sum(axis=1)
    assert np.abs(np.bincount(bars)[9:] / 3000 - 1 / 10).max() < 0.025
    # 14.5 words of 25 letters, of which the very first is not a label.
    assert abs((labels != NO_LABEL).sum(axis=1).mean() - (14.5 * 25 - 1)) < 6
    # Each legal letter is as likely: of two legal ones the first comes half of the time.
    lowest_cleared = legal & (legal - 1)
    two = (lowest_cleared != 0) & (lowest_cleared & (lowest_cleared - 1) == 0)
    lowest = labels[two] == np.log2(legal[two] & -legal[two])
    assert abs(lowest.mean() - 0.5) < 0.005


def test_a_guess_is_right_when_it_is_legal():
    batch = generate(PAPER, np.random.default_rng(0), rows=100)
    asked = batch.labels != NO_LABEL
    assert measure(PAPER, batch, batch.labels)["accuracy"] == 1.0
    lowest = np.where(asked, np.log2((batch.legal & -batch.legal).clip(1)), NO_LABEL).astype(int)
    figures = measure(PAPER, batch, lowest)
    assert figures["accuracy"] == 1.0
    assert 0.5 < figures["next_letter"] < 0.75
    for wrong in (PAPER.bar, PADDING):
        assert measure(PAPER, batch, np.full_like(batch.tokens, wrong))["accuracy"] == 0.0
    uniform = np.random.default_rng(1).integers(1, 19, size=batch.tokens.shape)
    figures = measure(PAPER, batch, uniform)
    assert abs(figures["accuracy"] - figures["uniform"]) < 0.01
    assert abs(figures["uniform"] - 2 / 18) < 0.01


def words(table, length, state=0):
    """All legal words of up to a length."""
    if length == 0:
        return {""}
    longer = [
        str(letter) + rest
        for letter in np.flatnonzero(table[state] >= 0)
        for rest in words(table, length - 1, table[state, letter])
    ]
    return {"", *longer}


def test_no_two_of_many_automata_have_the_same_words_and_a_row_can_be_read():
    tables = automata(PAPER, np.random.default_rng(0), rows=2000)
    assert len({frozenset(words(table, 3)) for table in tables}) > 1990
    shown = regbench.show(Config(longest_word=5), np.random.default_rng(0)).splitlines()
    assert shown[0].startswith("0: ")
    assert " to " in shown[0]
    assert 9 <= shown[-1].count(" | ") <= 18
