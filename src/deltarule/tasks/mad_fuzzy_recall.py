"""Fuzzy in-context recall: keys and values are words of one to three letters.

    .  .  a b c  x y  d a  z  b c a  x  ...  a b c  x
                                                 x  y     labels: the value of a key seen before

The reader has to find out where a word ends. Letters within a word differ. In training keys have
any size up to `motif`, and every next token is asked for; a test asks with keys of full size. As in
the benchmark, about one row in 40 ends before it showed the pair that it asks for.

Source: the MAD benchmark (arXiv 2403.17844), task "fuzzy in-context recall", with many queries.
"""

from dataclasses import dataclass

import numpy as np

from deltarule.nn.checks import check_least, check_that
from deltarule.tasks.batch import NO_LABEL, Batch, with_answers
from deltarule.tasks.mad import measure as measure
from deltarule.tasks.mqar import distinct

Word = tuple[int, ...]


@dataclass(frozen=True)
class Config:
    """Sizes of the task; the defaults are the benchmark's."""

    length: int = 128
    """Tokens in a row: padding, pairs, and the pair that is asked for."""
    vocab_size: int = 16
    """Tokens: letters of keys, as many letters of values (or one more), and one for padding."""
    motif: int = 3
    """Letters of the longest key and of the longest value."""
    training: bool = False
    """Shorter keys too, and a label for every next token, as the benchmark does in training."""

    def __post_init__(self) -> None:
        check_least(self, 1, "motif")
        said = f"length must be above 4 * motif = {4 * self.motif}, two pairs of the longest words"
        check_that(self.length > 4 * self.motif, said, self.length)
        said = f"vocab_size must be at least 2 * motif + 1 = {2 * self.motif + 1}"
        why = "letters within a word differ, and one token is padding"
        check_that(self.letters_of_keys >= self.motif, said, self.vocab_size, why)

    @property
    def letters_of_keys(self) -> int:
        """Letters of keys, the tokens from 0."""
        return (self.vocab_size - 1) // 2

    @property
    def letters_of_values(self) -> int:
        """Letters of values, the tokens after those of keys."""
        return self.vocab_size - 1 - self.letters_of_keys

    @property
    def padding(self) -> int:
        """The token before the first pair."""
        return self.vocab_size - 1

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the letters of values."""
        return 1 / self.letters_of_values


def generate(config: Config, rng: np.random.Generator, rows: int) -> Batch:
    sequence = np.full((rows, config.length + 1), config.padding, dtype=np.int64)
    answers = np.full((rows, config.length + 1), NO_LABEL, dtype=np.int64)
    for row in range(rows):
        letters, asked = _row(config, rng)
        sequence[row, -len(letters) :] = letters
        answers[row, -len(letters) :] = np.where(asked, letters, NO_LABEL)
    return Batch(sequence[:, :-1], (sequence if config.training else answers)[:, 1:])


def _row(config: Config, rng: np.random.Generator) -> tuple[list[int], list[bool]]:
    """The letters of one row without its padding, and which of them are asked for."""
    # More random words than a row can hold.
    count = config.length // 2 + 2

    def draw(letters: int, first: int, shortest: int) -> list[Word]:
        words = first + distinct(rng, count, letters, config.motif)
        sizes = rng.integers(shortest, config.motif + 1, size=count)
        return [tuple(word[:size]) for word, size in zip(words.tolist(), sizes, strict=True)]

    keys = draw(config.letters_of_keys, 0, 1 if config.training else config.motif)
    values = draw(config.letters_of_values, config.letters_of_keys, 1)
    probe = keys.pop()
    value_of = {probe: values.pop()}
    size = len(probe) + len(value_of[probe])
    # The pair asked for comes at the first gap between words from here on, if not by chance before.
    place = rng.integers(config.length - 2 * size)
    letters: list[int] = []
    asked: list[bool] = []
    seen: set[Word] = set()

    def write(key: Word, known: bool) -> None:
        value = value_of.setdefault(key, values.pop())
        letters.extend(key + value)
        asked.extend([False] * len(key) + [known] * len(value))
        seen.add(key)

    while len(letters) < config.length - size - 2 * config.motif:
        key = probe if len(letters) >= place and probe not in seen else keys.pop()
        write(key, key in seen)
    write(probe, True)
    return letters, asked


def show(config: Config, rng: np.random.Generator) -> str:
    """One row in words: letters from a for keys, from A for values, an arrow before each answer."""
    tokens, labels = (x[0].tolist() for x in generate(config, rng, rows=1))

    def letter(token: int) -> str:
        if token == config.padding:
            return "."
        if token < config.letters_of_keys:
            return chr(ord("a") + token)
        return chr(ord("A") + token - config.letters_of_keys)

    return with_answers(letter, tokens, labels)
