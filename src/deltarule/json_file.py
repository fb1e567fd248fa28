"""JSON that others may have written or damaged: one reader; its errors name file and field."""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

# No file of ours is longer; a damaged one could ask for any memory.
LONGEST = 100_000_000
NAMES: dict[Any, str] = {
    dict: "a JSON object", list: "a list", tuple: "a list", int: "an integer", float: "a number",
    str: "a string", bool: "true or false", Path: "a path",
}  # fmt: skip


def parse(text: str) -> Any:
    """What JSON text says; it may not nest too deeply, repeat a key or hold a huge integer."""
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_int=_integer)
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None


def parse_object(text: str) -> dict[str, Any]:
    return fitted(dict[str, Any], parse(text))


def read_text(path: Path) -> str:
    """The text of a file in UTF-8 that is not too long."""
    if path.stat().st_size > LONGEST:
        raise ValueError(f"longer than {LONGEST} bytes, the most such a file may have")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error}") from None


def fitted(kind: Any, value: Any, where: str = "") -> Any:
    """A value of JSON as the type that is written for it, dataclasses and all; `where` is its name.

    The type is a class, or `X | None`, `Literal`, `tuple[X, ...]`, `list[X]`, `dict[str, X]`.
    """
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and types.NoneType in inner:
            return None
        (other,) = (one for one in inner if one is not types.NoneType)
        return fitted(other, value, where)
    if origin is typing.Literal:
        return value if value in inner else _refuse(kind, value, where)
    if origin in (list, tuple) and isinstance(value, list):
        return origin(fitted(inner[0], x, f"{where}[{i}]") for i, x in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {name: fitted(inner[1], x, _below(where, name)) for name, x in value.items()}
    if kind is Any:
        return value
    taken = {float: (int, float), Path: (str,)}.get(kind, (kind,))
    if origin is not None or type(value) not in taken:
        return _refuse(kind, value, where)
    return kind(value) if kind in (float, Path) else value


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    given = fitted(dict[str, Any], value, where)
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    for field in dataclasses.fields(kind):
        absent = field.name not in given
        if absent and field.default is missing and field.default_factory is missing:
            raise ValueError(f"missing field {_below(where, field.name)!r}")
    if unknown := sorted(set(given) - {field.name for field in dataclasses.fields(kind)}):
        raise ValueError(f"unknown field {_below(where, unknown[0])!r}")
    return kind(**{n: fitted(hints[n], x, _below(where, n)) for n, x in given.items()})


def _refuse(kind: Any, value: Any, where: str) -> typing.NoReturn:
    expected = NAMES.get(typing.get_origin(kind) or kind, str(kind))
    shown = f" {value!r:.40}" if isinstance(value, str | int | float) else ""
    name = f"{where}: " if where else ""
    raise ValueError(f"{name}expected {expected}, got {type(value).__name__}{shown}")


def _below(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _integer(digits: str) -> int:
    # Python would take minutes to read a million digits.
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"an integer of {len(digits)} digits, {digits:.9}...: at most 2^63 - 1")
    return int(digits)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {max(keys, key=keys.count)!r} appears more than once")
    return fields
