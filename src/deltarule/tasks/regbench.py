"""In-context languages: words of a random automaton; say which letter may come next.

    a c f | a c a c | c f g ...       letters are labels; the bar between words is not

Each row has an automaton of its own, with all states accepting, and its words walk from state 0
along random legal letters. A guess is right when the automaton allows it, even if another letter
came; guessing the bar is wrong.

Source: In-context language learning (arXiv 2401.12973), as used in DeltaNet (arXiv 2406.06484),
figure 3. Its code also cuts a row at 4096 characters, which the longest of its rows (1897) never
reaches.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltarule.nn.checks import check_least, check_that
from deltarule.tasks.batch import NO_LABEL, Array

Flags = NDArray[np.bool_]

# What follows the last word of a row that is shorter than others.
PADDING = 0


@dataclass(frozen=True)
class Config:
    """Sizes of the task; the defaults are the paper's."""

    letters: int = 18
    """Letters of all automata, tokens from 1; each automaton knows `edges` + 1 of them or more."""
    states: int = 12
    """States of the largest automaton; the smallest has `edges` + 1."""
    edges: int = 3
    """Most letters that a state allows, to as many other states; the fewest is 1."""
    fewest_words: int = 10
    """Words of the row with the fewest."""
    most_words: int = 19
    """Words of the row with the most."""
    longest_word: int = 49
    """Letters of the longest word; the shortest has 1."""

    def __post_init__(self) -> None:
        check_least(self, 1, "edges", "fewest_words", "longest_word")
        for name in ("letters", "states"):
            value = getattr(self, name)
            check_that(value > self.edges, f"{name} must be above edges={self.edges}", value)
        check_that(self.letters <= 61, "letters must be at most 61", self.letters)
        said = f"most_words must be fewest_words={self.fewest_words} or more"
        check_that(self.most_words >= self.fewest_words, said, self.most_words)

    @property
    def vocab_size(self) -> int:
        """Letters, padding and the bar."""
        return self.letters + 2

    @property
    def length(self) -> int:
        """Tokens of the longest row that there can be, but for its last, which is only a label."""
        return self.most_words * (self.longest_word + 1) - 2

    @property
    def bar(self) -> int:
        """The token between words."""
        return self.letters + 1


class Batch(NamedTuple):
    """Tokens, next letters with NO_LABEL elsewhere, and what is legal; all [rows, length].

    Bit i of `legal` says that the automaton allows token i next; it is 0 where there is no label.
    """

    tokens: Array
    labels: Array
    legal: Array


def generate(config: Config, rng: np.random.Generator, rows: int) -> Batch:
    """Rows [rows, length], each from a new automaton."""
    return speak(config, rng, automata(config, rng, rows))


def speak(config: Config, rng: np.random.Generator, table: Array) -> Batch:
    """A row of words for each automaton; table [rows, states, letters] is one of `automata`."""
    rows, width = len(table), config.length + 1
    words = rng.integers(config.fewest_words, config.most_words + 1, size=(rows, 1))
    sizes = rng.integers(1, config.longest_word + 1, size=(rows, config.most_words))
    bars = (sizes + 1).cumsum(axis=1) - 1
    end = np.take_along_axis(bars, words - 1, 1)
    # At each place the letter comes next whose number is the highest of those that are legal.
    numbers = rng.random((int(end.max()), rows, config.letters))
    sequence = np.full((rows, width), config.bar, dtype=np.int64)
    legal = np.zeros_like(sequence)
    # The states of all rows in one list: their letters, the first one again where there are fewer,
    # and where each leads.
    allowed, first = table >= 0, config.states * np.arange(rows)
    letters = (~allowed).argsort(axis=2, kind="stable")[..., : config.edges]
    letters = np.where(np.take_along_axis(allowed, letters, 2), letters, letters[..., :1])
    leads = first[:, None, None] + np.take_along_axis(table, letters, 2)
    letters = letters.reshape(-1, config.edges)
    bits = (allowed @ 2 ** np.arange(1, config.letters + 1)).reshape(-1)
    # All words at once, the longest of them first; each begins in state 0.
    spoken = np.arange(config.most_words) < words
    order = (-sizes[spoken]).argsort()
    place, row = (bars - sizes)[spoken][order], np.nonzero(spoken)[0][order]
    state = first[row]
    for going in (sizes[spoken] > np.arange(config.longest_word)[:, None]).sum(axis=1):
        place, row, state = place[:going], row[:going], state[:going]
        drawn = ((place * rows + row) * config.letters)[:, None] + letters[state]
        edge = state * config.edges + numbers.take(drawn).argmax(axis=1)
        sequence[row, place], legal[row, place] = 1 + letters.take(edge), bits[state]
        place, state = place + 1, leads.take(edge)
    labels = np.where(legal > 0, sequence, NO_LABEL)
    # The last letter of a row is a label and no token.
    tokens = np.where(np.arange(width) < end - 1, sequence, PADDING)
    return Batch(tokens[:, :-1], labels[:, 1:], legal[:, 1:])


def automata(config: Config, rng: np.random.Generator, rows: int) -> Array:
    """Draw automata: the next state for each state and letter, or -1 where it is not legal.

    A state has 1 to `edges` letters, all different, to as many different states but its own. Of the
    table [rows, states, letters] an automaton reaches only the first states, as many as it has.
    """
    shape = (rows, config.states)
    states = rng.integers(config.edges + 1, config.states + 1, size=(rows, 1, 1))
    known = rng.integers(config.edges + 1, config.letters + 1, size=(rows, 1, 1))
    alphabet = rng.random((rows, 1, config.letters)).argsort(axis=2).argsort(axis=2) < known
    number = np.arange(config.states)
    others = (number < states) & (number != number[:, None])

    def choose(allowed: Flags) -> Array:
        times = rng.random((*shape, allowed.shape[2]))
        return np.where(allowed, times, 2.0).argsort(axis=2)[..., : config.edges]

    letters, targets = choose(alphabet), choose(others)
    used = np.arange(config.edges) < rng.integers(1, config.edges + 1, size=(*shape, 1))
    table = np.full((*shape, config.letters), -1)
    np.put_along_axis(table, letters, np.where(used, targets, -1), axis=2)
    return table


def measure(config: Config, batch: Batch, guesses: Array) -> dict[str, float]:
    """Shares of guesses: "accuracy", that are legal; "next_letter", that came; and as "uniform"
    the accuracy of guessing any letter, each as likely.
    """
    asked = batch.labels != NO_LABEL
    legal, given = batch.legal[asked], guesses[asked]
    allowed = np.count_nonzero(np.unpackbits(legal.view(np.uint8)))
    return {
        "accuracy": float((legal >> given & 1).mean()),
        "next_letter": float((batch.labels[asked] == given).mean()),
        "uniform": allowed / (legal.size * config.letters),
    }


def show(config: Config, rng: np.random.Generator) -> str:
    """One row: each state of its automaton, and the letters and states that follow; the words."""
    table = automata(config, rng, 1)
    tokens = speak(config, rng, table).tokens[0]
    names = [".", *(chr(ord("a") + letter) for letter in range(config.letters)), " | "]
    states = [
        f"{state}: " + ", ".join(f"{names[x + 1]} to {row[x]}" for x in np.flatnonzero(row >= 0))
        for state, row in enumerate(table[0, : table.max() + 1])
    ]
    return "\n".join([*states, "".join(names[token] for token in tokens)])
