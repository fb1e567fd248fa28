"""Markdown that scripts write: tables, and the part of a page between two marks."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class Marks(NamedTuple):
    """The lines between which a page is written by a script."""

    begin: str
    end: str


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    lines = ((cell.replace("|", "\\|") for cell in cells) for cells in (heads, *rows))
    first, *others = (f"| {' | '.join(cells)} |" for cells in lines)
    return [first, "|---" * len(heads) + "|", *others]


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(markdown(heads, rows))


def write_between(page: Path, marks: Marks, lines: Sequence[str], *, new: str = "") -> None:
    """Replace what is between the marks of a page, which begins as `new` if there is none."""
    begin, end = marks
    text = page.read_text(encoding="utf-8") if page.exists() else f"{new}\n{begin}\n{end}\n"
    if begin not in text or end not in text:
        raise ValueError(f"{page} lacks {begin!r} or {end!r}: put both back, each on its own line")
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    page.write_text(before + "\n".join([begin, "", *lines, "", end]) + after, encoding="utf-8")
