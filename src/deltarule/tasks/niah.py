"""A needle in a haystack: a key and its value hidden in a long text, and asked for at its end.

    BEGIN ... text ... One of the special magic numbers for KEY is: VALUE. ... text ...
    What is the special magic number for KEY mentioned in the provided text? The special magic
    number for KEY mentioned in the provided text is VALUE

The bytes of the last VALUE are the labels, each at the byte before it, so that a row is right when
greedy generation would go on with the value.

    S-NIAH-1    haystack "noise", the same five sentences over and over; value "number", 7 digits
    S-NIAH-2    haystack "prose"; value "number"
    S-NIAH-3    haystack "prose"; value "uuid", 36 characters

Source: RULER (arXiv 2404.06654), as used in Gated DeltaNet (arXiv 2412.06464), section 3.5. Its
prose is essays under copyright; here it is what every machine has, the docstrings of Python's own
library.
"""

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np

from deltarule.models.bytes import BEGIN, decode
from deltarule.nearest import check_known
from deltarule.nn.checks import check_that
from deltarule.tasks.batch import NO_LABEL, Array, Batch
from deltarule.train.documents import Document, read_documents, split_documents

Haystack = Literal["noise", "prose", "any"]
Value = Literal["number", "uuid", "any"]
Split = Literal["training", "validation"]
HAYSTACKS: tuple[Haystack, ...] = ("noise", "prose")
VALUES: tuple[Value, ...] = ("number", "uuid")

DOCSTRING = re.compile(rb'"""(.*?)"""', re.DOTALL)
PARAGRAPH = re.compile(rb"\n\s*\n")
SENTENCE_END = re.compile(rb"(?<=[.!?]) (?=[A-Z])")
# Plain words, so that no signature, table or example is taken for a sentence.
SENTENCE = re.compile(rb"[A-Z][A-Za-z0-9 ,;:'\"()/-]{20,200}[.!?]")

OPENING = (
    "A special magic {value} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {value} afterwards.\n"
)
NEEDLE = "One of the special magic {value}s for {key} is: {answer}."
QUESTION = "\nWhat is the special magic {value} for {key} mentioned in the provided text?"
REPLY = " The special magic {value} for {key} mentioned in the provided text is "
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# How far into the prose the needle may stand, in percent.
DEPTHS = np.round(np.linspace(0, 100, num=40)).astype(int)

ADJECTIVES = """
able bitter bright calm clever cold dusty early empty fair fierce gentle golden happy hollow humble
idle jolly keen late little lonely loud lucky mellow modest narrow noble odd old pale patient plain
proud quick quiet rapid rough round scarce sharp short silent simple sleepy slow small smooth soft
solid steep stern sudden sweet tall tender thin tidy tiny vast warm weary wide wild wise young
"""
NOUNS = """
anchor apple arrow barrel basket beacon bell bottle branch bridge bucket button candle canvas castle
cellar chain circle cloud comet copper corner cradle engine falcon feather fence field fountain
garden glove hammer harbor island jacket kettle ladder lantern lemon letter magnet marble meadow
mirror needle orchard paddle parcel pebble pencil pepper pillow pocket river saddle shadow shelter
signal spiral table temple thread ticket tunnel valley violin wagon window
"""
KEYS = [f"{adjective}-{noun}" for adjective in ADJECTIVES.split() for noun in NOUNS.split()]
LONGEST_KEY = max(KEYS, key=len)
LONGEST_ANSWERS = {"number": "0" * 7, "uuid": "0" * 36, "any": "0" * 36}


class Prose(NamedTuple):
    """Sentences in the order of the text, and where each would start if one space followed each."""

    sentences: list[str]
    starts: Array


@cache
def read_prose(split: Split) -> Prose:
    """All sentences of one part of the documents; none of these is in both parts."""
    return prose_of(read_documents().documents, split)


def prose_of(documents: list[Document], split: Split) -> Prose:
    """The sentences of the docstrings of those documents that are of one part."""
    training, validation = split_documents(documents)
    sentences = [
        sentence.decode()
        for document in (training if split == "training" else validation)
        for docstring in DOCSTRING.findall(document.text)
        for paragraph in PARAGRAPH.split(docstring)
        for sentence in SENTENCE_END.split(b" ".join(paragraph.split()))
        if SENTENCE.fullmatch(sentence)
    ]
    return Prose(sentences, np.cumsum([0, *(len(sentence) + 1 for sentence in sentences)]))


ReadProse = Callable[[Split], Prose]


@dataclass(frozen=True)
class Config:
    """The haystack, the needle's value and the length."""

    haystack: Haystack = "noise"
    """What the needle is hidden in; "any" draws one of the two for each row."""
    value: Value = "number"
    """What the needle holds; "any" draws one of the two for each row."""
    length: int = 512
    """Tokens in a row, one for each byte and one to begin; whole sentences fill it."""
    instructions: bool = True
    """Open and ask as RULER does; False leaves only the needle and the reply, for short rows."""
    split: Split = "training"
    """Which part of the prose: evaluate on "validation", which training never sees."""
    every_byte: bool = False
    """Every next byte of the row is a label, as in language modelling, not only the value's."""
    vocab_size: ClassVar[int] = BEGIN + 1
    """The bytes, and what begins a row."""

    def __post_init__(self) -> None:
        for name, kind in (("haystack", Haystack), ("value", Value), ("split", Split)):
            check_known(name, getattr(self, name), get_args(kind))
        *_, room = self.words(LONGEST_KEY, LONGEST_ANSWERS[self.value])
        least = f"length must be at least {self.length - room + len(NOISE) + 1}"
        said = f"{least} for this value and these instructions"
        check_that(room > len(NOISE), said, self.length)

    def words(self, key: str, answer: str) -> tuple[str, str, str, int]:
        """What comes before the haystack, the needle, what comes after but for the answer; and the
        bytes left for the haystack, counting what joins its sentences.
        """
        after = QUESTION + REPLY if self.instructions else REPLY
        templates = OPENING if self.instructions else "", NEEDLE, after
        before, needle, after = (
            template.format(value=self.value, key=key, answer=answer) for template in templates
        )
        return before, needle, after, self.length - len(before + needle + after + answer)

    def settled(self, rng: np.random.Generator) -> "Config":
        """One haystack and one value in place of any."""
        if "any" not in (self.haystack, self.value):
            return self
        drawn: dict[str, Any] = {
            "haystack": HAYSTACKS[rng.integers(2)],
            "value": VALUES[rng.integers(2)],
        }
        return replace(self, **{k: x for k, x in drawn.items() if getattr(self, k) == "any"})


def prosaic(room: int, prose: Prose, rng: np.random.Generator) -> list[str]:
    """Sentences of prose from a random one on, as many as fit with a byte after each."""
    sentences, starts = prose
    most = f"length must leave less than {starts[-1]} bytes to the haystack"
    check_that(starts[-1] > room, f"{most}, all that the prose of this split holds", room)
    first = int(rng.integers(np.searchsorted(starts, starts[-1] - room)))
    last = int(np.searchsorted(starts, starts[first] + room, side="right")) - 1
    return sentences[first:last]


def row_text(
    config: Config, key: str, answer: str, rng: np.random.Generator, prose: ReadProse
) -> str:
    before, needle, after, room = config.words(key, answer)
    if config.haystack == "noise":
        # The five sentences in one piece, as often as they fit with a byte after each.
        sentences, between = [NOISE] * (room // (len(NOISE) + 1)), "\n"
        depth = rng.integers(len(sentences))
    else:
        sentences, between = prosaic(room, prose(config.split), rng), " "
        depth = len(sentences) * rng.choice(DEPTHS) // 100
    sentences.insert(int(depth), needle)
    return before + between.join(sentences) + after + answer


def generate(
    config: Config, rng: np.random.Generator, rows: int, prose: ReadProse = read_prose
) -> Batch:
    """Rows [rows, length] of sentences that `prose` gives; BEGIN fills up what is left."""
    tokens = np.full((rows, config.length), BEGIN, dtype=np.int64)
    labels = np.full_like(tokens, NO_LABEL)
    for index in range(rows):
        kind = config.settled(rng)
        key = KEYS[rng.integers(len(KEYS))]
        # A number of 7 digits, or a random UUID of version 4.
        number = kind.value == "number"
        answer = rng.integers(10**6, 10**7) if number else uuid.UUID(bytes=rng.bytes(16), version=4)
        text = np.frombuffer(row_text(kind, key, str(answer), rng, prose).encode(), np.uint8)
        first = 0 if config.every_byte else len(text) - len(str(answer))
        tokens[index, 1 : len(text)] = text[:-1]
        labels[index, first : len(text)] = text[first:]
    return Batch(tokens, labels)


def show(config: Config, rng: np.random.Generator) -> str:
    tokens, labels = (x[0] for x in generate(config, rng, rows=1))
    answer = decode(labels[labels != NO_LABEL].tolist())
    return f"{decode(tokens.tolist()).removesuffix(answer[:-1])}\n-> {answer}"
