"""What stands on a command line beside flags: `--config-file FILE`, and words without a flag.

A TOML file has one line for each flag, in tables or not:

steps = 4000
layer-types = ["kda", "attention"]
"""

import dataclasses
import itertools
import json
import tomllib
import typing
from pathlib import Path
from typing import Any

from deltarule.json_file import read_text
from deltarule.nearest import nearest


def completed(kind: type[Any], bare: str | None, words: list[str]) -> list[str]:
    """Words with those of a configuration file in front, and the flag `bare` before bare ones."""
    place = next((i for i, word in enumerate(words) if word.split("=")[0] == "--config-file"), None)
    mine, file = words, None
    if place is not None:
        _, equals, one = words[place].partition("=")
        file = one if equals else "".join(words[place + 1 : place + 2])
        mine = [*words[:place], *words[place + (1 if equals else 2) :]]
        if not file or file.startswith("--"):
            raise ValueError("--config-file needs the path of a TOML file after it")
    if bare is not None:
        mine = named(bare, kind, mine)
    if file is None:
        return mine
    first = list(itertools.takewhile(lambda x: not x.startswith("-"), mine))
    return [*first, *words_of_file(Path(file), kind), *mine[len(first) :]]


def named(bare: str, kind: type[Any], words: list[str]) -> list[str]:
    """Words with a flag before the bare ones, beyond those that must be given."""
    required = sum(
        field.default is field.default_factory is dataclasses.MISSING
        for field in dataclasses.fields(kind)
    )
    kinds = flags_of(kind)
    # The places of words that are neither a flag nor what a flag is given.
    places, values = list[int](), 0
    for place, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        of_flag = kinds.get(flag.removeprefix("--").replace("-", "_"))
        if word == "-h" or word.startswith("--"):
            alone = equals or of_flag is bool or word == "-h" or word.startswith("--no-")
            values = 0 if alone else len(words) if typing.get_origin(of_flag) is tuple else 1
        elif values:
            values -= 1
        else:
            places.append(place)
    if len(places) <= required:
        return words
    first, *more = [words[place] for place in places[required:]]
    if any(word.partition("=")[0] == f"--{bare}" for word in words):
        raise ValueError(f"{first!r} is read as --{bare}, which is given too: leave one out")
    if more and typing.get_origin(kinds[bare]) is not tuple:
        raise ValueError(
            f"{more[0]!r} is one word too many after {first!r}, the {bare}: "
            "put text with spaces in quotes"
        )
    kept = [word for place, word in enumerate(words) if place not in places[required:]]
    return [*kept, *([f"--{bare}", first, *more] if more else [f"--{bare}={first}"])]


def flags_of(kind: type[Any]) -> dict[str, Any]:
    """The flags of a command and their types, in the order of its dataclass and of those in it."""
    hints = typing.get_type_hints(kind)
    flags: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        inner = hints[field.name]
        nested = isinstance(inner, type) and dataclasses.is_dataclass(inner)
        flags |= flags_of(inner) if nested else {field.name: inner}
    return flags


def words_of_file(path: Path, kind: type[Any]) -> list[str]:
    """The words that a TOML file, whose tables only order it, stands for on a command line."""
    try:
        table = tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "nested too deeply"
        raise ValueError(f"--config-file {path}: {reason}") from None
    known = [name.replace("_", "-") for name in flags_of(kind)]
    words: list[str] = []
    for key, value in flat(table).items():
        name = key.replace("_", "-")
        if name not in known:
            meant = nearest(name, known, otherwise=f"known: {', '.join(known)}")
            raise ValueError(f"--config-file {path}: there is no flag {key!r}; {meant}")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            many = value if isinstance(value, list) else [value]
            words += [f"--{name}", *(str(one) for one in many)]
    return words


def to_toml(options: dict[str, Any]) -> str:
    """Options as `words_of_file` reads them."""
    # JSON's words for strings, numbers, lists and flags are TOML's.
    given = {n.replace("_", "-"): "None" if x is None else x for n, x in options.items()}
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items())


def flat(options: dict[str, Any]) -> dict[str, Any]:
    """Nested options under their last names, which are unique, as on the command line."""
    plain: dict[str, Any] = {}
    for name, value in options.items():
        plain.update(flat(value) if isinstance(value, dict) else {name: value})
    return plain
