"""Flags in a TOML file, `--config-file FILE`: one line for each, in tables or not.

steps = 4000
layer-types = ["kda", "attention"]
"""

import dataclasses
import json
import tomllib
import typing
from pathlib import Path
from typing import Any

from deltarule.json_file import read_text
from deltarule.nearest import nearest


def flag_names(kind: type[Any]) -> list[str]:
    """The flags of a command, in the order of its dataclass."""
    hints = typing.get_type_hints(kind)
    names: list[str] = []
    for field in dataclasses.fields(kind):
        inner = hints[field.name]
        nested = isinstance(inner, type) and dataclasses.is_dataclass(inner)
        names += flag_names(inner) if nested else [field.name]
    return names


def words_of_file(path: Path, kind: type[Any]) -> list[str]:
    """The words that a TOML file, whose tables only order it, stands for on a command line."""
    try:
        table = tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "nested too deeply"
        raise ValueError(f"--config-file {path}: {reason}") from None
    known = [name.replace("_", "-") for name in flag_names(kind)]
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
