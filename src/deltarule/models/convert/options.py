"""Tables of options: what config.json of a family says, and which option here says the same.

An entry of a table reads and writes; the factories below make one for each usual kind.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deltarule.models.config import ModelConfig
from deltarule.models.convert.fields import Fields

# Options of `ModelConfig`, or of a config.json.
Options = dict[str, Any]
Written = Callable[[ModelConfig], Options]
Value = Callable[[ModelConfig], Any]
# Beside a value: one that follows from the options here that are found before it.
Follows = Callable[[Options], Any]


def nothing(config: ModelConfig) -> Options:
    return {}


@dataclass(frozen=True)
class Entry:
    """Options that say the same in config.json and here.

    `read` makes further options of config.json and of those that the entries before have found;
    `write` goes back from a configuration with every option written out.
    """

    read: Callable[[Fields, Options], Options]
    write: Written = nothing


Table = tuple[Entry, ...]


def read(table: Iterable[Entry], fields: Fields) -> Options:
    found: Options = {}
    for entry in table:
        found |= entry.read(fields, found)
    return found


def write(table: Iterable[Entry], config: ModelConfig) -> Options:
    """The options of config.json; a later entry overrules."""
    return {name: value for entry in table for name, value in entry.write(config).items()}


def option(
    theirs: str, ours: str, take: Callable[[Fields, Any], Any], default: Any, value: Value | None
) -> Entry:
    """One option there and one here; `value` is what is written, where it is not that one here."""

    def found(fields: Fields, before: Options) -> Options:
        return {ours: take(fields, default(before) if callable(default) else default)}

    return Entry(found, lambda c: {theirs: getattr(c, ours) if value is None else value(c)})


def integer(
    theirs: str,
    ours: str | None = None,
    default: int | Follows | None = None,
    *,
    smallest: int = 0,
    value: Value | None = None,
) -> Entry:
    """An integer, by the same name if only one is given; without a default it is required."""

    def take(fields: Fields, default: int | None) -> int:
        return fields.integer(theirs, default, smallest)

    return option(theirs, ours or theirs, take, default, value)


def number(theirs: str, ours: str, default: float | None = None) -> Entry:
    """A number; without a default it is required."""
    return option(theirs, ours, lambda fields, x: fields.number(theirs, x), default, None)


def factor(name: str, value: Value | None = None) -> Entry:
    return option(name, name, lambda fields, _: fields.factor(name), None, value)


def flag(theirs: str, ours: str, default: bool) -> Entry:
    return option(theirs, ours, lambda fields, x: fields.flag(theirs, x), default, None)


def word(theirs: str, words: Mapping[str, Any], default: str, ours: str | None = None) -> Entry:
    """One of their words, by which ours go."""

    def take(fields: Fields, default: str) -> Any:
        return words[fields.word(theirs, default, words)]

    back = {own: given for given, own in words.items()}
    name = ours or theirs
    return option(theirs, name, take, default, lambda config: back.get(getattr(config, name)))


def passing(take: Callable[[Fields], None]) -> Entry:
    """Options that become none here."""

    def found(fields: Fields, before: Options) -> Options:
        take(fields)
        return {}

    return Entry(found)


def only(values: Mapping[str, object]) -> Entry:
    """Options of which only some values can be said here: one, or those of a tuple."""

    def take(fields: Fields) -> None:
        for name, known in values.items():
            fields.only(name, *(known if isinstance(known, tuple) else (known,)))

    return passing(take)


def silent(*names: str) -> Entry:
    return passing(lambda fields: fields.drop(*names))


def older(names: Mapping[str, str]) -> Entry:
    """Older names of options that follow, by which the newer ones go."""
    return passing(lambda fields: fields.rename(names))


def fixed(here: Options | None = None, there: Options | None = None) -> Entry:
    """What every model of a family has, in words of one side alone."""
    return Entry(lambda fields, before: here or {}, lambda config: there or {})


def where(test: Callable[[Options], bool], table: Table, *, always: bool = False) -> Entry:
    """A table that counts only where the options here say so; `always`: it is written anyway."""

    def found(fields: Fields, before: Options) -> Options:
        own = read(table, fields)
        return own if test(before) else {}

    return Entry(found, lambda c: write(table, c) if always or test(vars(c)) else {})


# Unless they are known, no token is special.
NO_TOKENS = fixed(there={"pad_token_id": None, "bos_token_id": None, "eos_token_id": None})


def sizes(
    vocab_size: int | None = None,
    hidden_size: int | None = None,
    num_layers: int | Follows | None = None,
) -> Table:
    return (
        integer("vocab_size", default=vocab_size),
        integer("hidden_size", default=hidden_size, smallest=1),
        integer("num_hidden_layers", "num_layers", num_layers),
        NO_TOKENS,
    )


def tied(otherwise: bool) -> Entry:
    return flag("tie_word_embeddings", "tie_embeddings", otherwise)


def negative(theirs: str, otherwise: bool) -> Entry:
    """Write strengths up to 2 if they say so, and else up to 1."""
    return Entry(
        lambda fields, before: {"beta_max": 2.0 if fields.flag(theirs, otherwise) else 1.0},
        lambda config: {theirs: config.beta_max == 2},
    )
