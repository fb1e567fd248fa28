"""Words of a command line that stand for a flag without its name: the prompt, names of runs."""

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from typing import Any


def named(bare: str, flags: type[Any], words: list[str]) -> list[str]:
    """Words with a flag before the bare ones, beyond those that must be given."""
    required = sum(
        field.default is field.default_factory is dataclasses.MISSING
        for field in dataclasses.fields(flags)
    )
    kinds = typing.get_type_hints(flags)
    places = list(bare_words(kinds, words))
    if len(places) <= required:
        return words
    first, *more = [words[place] for place in places[required:]]
    if any(word.partition("=")[0] == f"--{bare}" for word in words):
        raise ValueError(f"{first!r} stands for --{bare}, which is given too: leave one out")
    if more and typing.get_origin(kinds[bare]) is not tuple:
        raise ValueError(
            f"{more[0]!r} is one word too many after {first!r}, the {bare}: "
            "what holds spaces needs quotes"
        )
    kept = [word for place, word in enumerate(words) if place not in places[required:]]
    given = [f"--{bare}", first, *more] if more else [f"--{bare}={first}"]
    return [*kept, *given]


def bare_words(kinds: dict[str, Any], words: Sequence[str]) -> Iterator[int]:
    """The places of words that are neither a flag nor what a flag is given."""
    values = 0
    for place, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        kind = kinds.get(flag.removeprefix("--").replace("-", "_"))
        if word == "-h" or word.startswith("--"):
            alone = equals or kind is bool or word == "-h" or word.startswith("--no-")
            values = 0 if alone else len(words) if typing.get_origin(kind) is tuple else 1
        elif values:
            values -= 1
        else:
            yield place
