"""Markdown that scripts write: tables, and the part of a page between two marks."""

from collections.abc import Iterable, Sequence
from pathlib import Path


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ((cell.replace("|", "\\|") for cell in cells) for cells in (heads, *rows))
    first, *others = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([first, "|---" * len(heads) + "|", *others])


def write_between(page: Path, what: str, lines: Sequence[str], *, new: str = "") -> None:
    """Replace what is between the two marks of `what`; a page that is not there begins as `new`."""
    begin, end = f"<!-- {what}: written by a script, do not edit -->", f"<!-- end of {what} -->"
    text = page.read_text(encoding="utf-8") if page.exists() else f"{new}\n{begin}\n{end}\n"
    if begin not in text or end not in text:
        raise ValueError(f"{page} lacks {begin!r} or {end!r}: put both back, each on its own line")
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    page.write_text(before + "\n".join([begin, "", *lines, "", end]) + after, encoding="utf-8")
