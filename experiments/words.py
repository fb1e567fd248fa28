"""What stands beside an experiment's code: its words and its settings.

`words/NAME.md` has a heading, what a reader sees, the source, a line for each form, a remark below
the table, the paper's figures as a table, and lists of differences, each for the forms it names;
all but the first four where there are such.

`settings/NAME.toml` has a table for each form. What stands under `all` holds for every form that
does not say otherwise. `model`, `optimizer`, `loop` and `cell` are arguments of `ModelConfig`,
`OptimizerOptions`, `LoopOptions` and `TaskCell`.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

# A form for two CPU cores, one for minutes on GPUs, and the paper's own setting, for hours on them.
Scale = Literal["laptop", "gpu", "published"]
SCALES: tuple[Scale, ...] = ("laptop", "gpu", "published")
Form = dict[str, Any]
DIFFERENCES = "Differences: "
HERE = Path(__file__).parent


class Words(NamedTuple):
    """What a page says of an experiment that no result decides."""

    title: str
    shows: str
    """What a reader sees, in one or two sentences."""
    source: str
    """Paper and figure or table."""
    needs: dict[Scale, str]
    """What each form takes, such as "7 curves of 2 minutes on 2 cores". A form without an entry
    does not exist."""
    deviations: dict[Scale, list[str]]
    """Every way in which a form differs from the paper's setting, a sentence each."""
    remark: str = ""
    """What stands below the table."""
    published: Mapping[str, Mapping[Any, float]] = MappingProxyType({})
    """The paper's figures by row and column; a column that is named by a number is an int."""


def read_words(name: str, folder: Path = HERE) -> Words:
    """The words of the experiment of this name."""
    text = (folder / "words" / f"{name}.md").read_text(encoding="utf-8")
    top, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    title, shows, source, needs = top.strip().split("\n\n")
    parts = [section.split("\n\n", 1) for section in sections]
    one_of_a_kind = dict[str, str](parts)
    forms = dict(line.split(": ", 1) for line in bullets(needs))
    deviations: dict[Scale, list[str]] = {scale: [] for scale in SCALES if scale in forms}
    for heading, body in parts:
        for scale, lines in deviations.items():
            if scale in heading.removeprefix(DIFFERENCES).split(", "):
                lines += bullets(body)
    return Words(
        title.removeprefix("# "),
        one_line(shows),
        one_line(source).removeprefix("From ").removesuffix("."),
        {scale: forms[scale] for scale in deviations},
        deviations,
        one_line(one_of_a_kind.get("Remark", "")),
        figures(one_of_a_kind.get("Published", "")),
    )


def bullets(text: str) -> list[str]:
    return [one_line(item) for item in re.split(r"^- ", text, flags=re.MULTILINE)[1:]]


def one_line(text: str) -> str:
    return " ".join(text.split())


def figures(table: str) -> dict[str, dict[Any, float]]:
    """The numbers of a table by row and column; a dash is none."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    names = [int(name) if name.isdigit() else name for name in rows[0][1:]] if rows else []
    found = {row[0]: dict(zip(names, row[1:], strict=True)) for row in rows[2:]}
    return {
        row: {name: float(cell) for name, cell in cells.items() if cell != "-"}
        for row, cells in found.items()
    }


def read_settings(name: str, folder: Path = HERE) -> dict[Any, Form]:
    """The forms of the experiment of this name."""
    path = folder / "settings" / f"{name}.toml"
    forms: dict[Any, Form] = tomllib.loads(path.read_text(encoding="utf-8"))
    common = forms.pop("all", {})
    return {scale: merged(common, form) for scale, form in forms.items()}


def merged(common: Any, own: Any) -> Any:
    """The own value, or of two tables the entries of both."""
    if isinstance(common, dict) and isinstance(own, dict):
        return common | {key: merged(common.get(key), value) for key, value in own.items()}
    return own
