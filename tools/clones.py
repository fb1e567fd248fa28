"""A budget on copies: at most 4 % of the library's lines of code stand in a run written twice.

Two runs are the same if six statement lines in a row are equal up to white space. Imports,
signatures and argument lists passed on by name do not count: writing them out is the style here.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("src", "experiments", "bench")

RUN = 6
SHARE = 0.04

Line = tuple[int, str]


def main() -> int:
    """Print the share and the places; 1 if the share is over the budget."""
    files = {
        str(file.relative_to(ROOT)): body_lines(file.read_text())
        for name in SOURCES
        for file in sorted((ROOT / name).rglob("*.py"))
    }
    copies = copied_runs(files)
    total = sum(len(lines) for lines in files.values())
    copied = sum(len(numbers) for numbers in copied_lines(copies).values())
    share = copied / max(total, 1)
    print(f"{copied} of {total} lines of code are copies: {share:.1%}, at most {SHARE:.0%}")
    for first, others in sorted(copied_files(copies).items()):
        print(f"  {first} again in {', '.join(sorted(others))}")
    return share > SHARE


def body_lines(text: str) -> list[Line]:
    """Lines of code with their numbers, without those that do not count."""
    skipped = passed_over(ast.parse(text))
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        folded = re.sub(r"\s+", " ", line.partition("  #")[0]).strip()
        argument_by_name = re.fullmatch(r"(\w+)=\1,|\w+,|[\w.]+ = [\w.]+,?", folded)
        if number in skipped or argument_by_name or not re.search(r"\w", folded):
            continue
        if not folded.startswith("#"):
            lines.append((number, folded))
    return lines


def passed_over(tree: ast.Module) -> set[int]:
    """Numbers of the lines of docstrings, imports and signatures."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines |= set(range(node.lineno, (node.end_lineno or 0) + 1))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines |= set(range(node.lineno, (node.end_lineno or 0) + 1))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines |= set(range(node.lineno, node.body[0].lineno))
    return lines


def copied_runs(files: dict[str, list[Line]]) -> list[list[tuple[str, int]]]:
    """Places of each run of `RUN` lines that stands in more than one."""
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for file, lines in files.items():
        for i in range(len(lines) - RUN + 1):
            window = lines[i : i + RUN]
            places[tuple(line for _, line in window)].append((file, window[0][0]))
    return [found for found in places.values() if len(found) > 1]


def copied_lines(copies: list[list[tuple[str, int]]]) -> dict[str, set[int]]:
    """Numbers of the lines of every place but the first."""
    lines: dict[str, set[int]] = defaultdict(set)
    for _, *others in copies:
        for file, start in others:
            lines[file] |= set(range(start, start + RUN))
    return lines


def copied_files(copies: list[list[tuple[str, int]]]) -> dict[str, set[str]]:
    """Which files repeat a run of which, for the reader."""
    files: dict[str, set[str]] = defaultdict(set)
    for (first, _), *others in copies:
        files[first] |= {file for file, _ in others}
    return files


if __name__ == "__main__":
    sys.exit(main())
