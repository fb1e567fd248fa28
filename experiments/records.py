"""The JSON files of an experiment: one for each finished cell, and one for all of them together."""

import dataclasses
import json
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import deltarule
from deltarule.atomic_file import write_atomically
from experiments.experiment import Cell, Result

Record = dict[str, Any]

# Goes up when files of before can no longer be read.
FORMAT = 1


class RecordError(ValueError):
    """A file of results is damaged, or of another version or configuration."""


def plain(value: Any) -> Any:
    """A dataclass as JSON gives it back: tuples are lists."""
    whole = dataclasses.asdict if dataclasses.is_dataclass(value) else lambda given: given
    return json.loads(json.dumps(whole(value), default=dataclasses.asdict))


def write_json(path: Path, content: Record) -> None:
    """Write a file whole or not at all; nan and infinity, which JSON lacks, are refused."""
    # A line for each entry of the whole: long lists of numbers would else fill a page each.
    entries = [f"{json.dumps(key)}: {json.dumps(content[key], allow_nan=False)}" for key in content]
    text = "{\n" + ",\n".join(entries) + "\n}\n"
    write_atomically(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> Record:
    """Read a file of results of this format, or name the version that wrote another."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(f"{path}: damaged: {error}; remove it to run it again") from None
    if not isinstance(content, dict) or "format" not in content:
        raise RecordError(f"{path}: this is no file of results; remove it")
    if content["format"] != FORMAT:
        raise RecordError(
            f"{path}: results of format {content['format']}, written by deltarule "
            f"{content.get('deltarule', 'of an unknown version')}; this is deltarule "
            f"{deltarule.__version__}, which reads format {FORMAT}: {START_ANEW}"
        )
    return content


START_ANEW = "move the folder away, or choose another --runs, to start anew"


def header(cell: Cell) -> Record:
    """What a cell's results depend on: versions and the whole configuration."""
    return {"format": FORMAT, "deltarule": deltarule.__version__, "cell": plain(cell)}


def checked(path: Path, cell: Cell) -> Record:
    """Read a file that belongs to a cell, finished or begun; a `RecordError` says what differs."""
    record, ours = read_json(path), header(cell)
    if record.get("deltarule") != ours["deltarule"]:
        raise RecordError(
            f"{path}: written by deltarule {record.get('deltarule')}, but this is deltarule "
            f"{ours['deltarule']}: {START_ANEW}"
        )
    told = completed(record.get("cell"), cell)
    if told != ours["cell"]:
        name, theirs, wanted = difference(told, ours["cell"])
        raise RecordError(
            f"{path}: of another configuration, {name} is {theirs!r} there and {wanted!r} here: "
            f"{START_ANEW}"
        )
    return record


def completed(told: Any, ours: Any) -> Any:
    """A configuration from a file, with the defaults of fields that are newer than the file."""
    if isinstance(told, dict) and dataclasses.is_dataclass(ours):
        newer = [field for field in dataclasses.fields(ours) if field.name not in told]
        known = {name: completed(of, getattr(ours, name, None)) for name, of in told.items()}
        return known | {field.name: plain(of) for field in newer for of in default(field)}
    if isinstance(told, list) and isinstance(ours, list | tuple) and len(told) == len(ours):
        return [completed(one, of) for one, of in zip(told, ours, strict=True)]
    return told


def default(field: "dataclasses.Field[Any]") -> tuple[Any, ...]:
    """A field's default; nothing where it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return (field.default_factory(),)
    return () if field.default is dataclasses.MISSING else (field.default,)


def difference(theirs: Any, ours: Any, name: str = "") -> tuple[str, Any, Any]:
    """The first place where two configurations differ, and what stands there.

    Examples:
        >>> difference({"loop": {"steps": 1}}, {"loop": {"steps": 2}})
        ('loop.steps', 1, 2)
    """
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in [*ours, *theirs]:
            if theirs.get(key) != ours.get(key):
                return difference(theirs.get(key), ours.get(key), f"{name}.{key}".lstrip("."))
    return name or "the cell", theirs, ours


def to_results(records: Sequence[Record]) -> list[Result]:
    return [Result(x["cell"]["name"], x["cell"], x["figures"], x["error"]) for x in records]


def machine(device: torch.device) -> str:
    """What computes, in words."""
    cores = os.cpu_count()
    processor = f"{processor_name()}, {cores} core{'' if cores == 1 else 's'}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}; {processor}"
    return processor if device.type == "cpu" else f"{device.type} of {processor}"


def processor_name() -> str:
    """The CPU's own name where the system tells it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
