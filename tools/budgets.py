"""Budgets on length: half the functions within 12 lines, nine tenths within 45, files within 300.

A function's lines are those that hold code: its signature counts; docstring, comments and blank
lines do not, nor do functions inside it, which are counted on their own.
"""

import ast
import io
import statistics
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src"

MEDIAN = 12
NINE_TENTHS = 45
FUNCTION = 90
FILE = 300

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Length(NamedTuple):
    """A function and the number of its lines."""

    lines: int
    where: str


def main() -> int:
    """Print the figures and every excess; 1 if there is any."""
    files = sorted(SOURCE.rglob("*.py"))
    functions = [length for file in files for length in function_lengths(file)]
    lines = [length.lines for length in functions]
    median = statistics.median(lines)
    tenth = sorted(lines)[int(0.9 * len(lines))]
    print(f"{len(functions)} functions: median {median:g}, nine tenths within {tenth} lines")

    excesses = []
    if median > MEDIAN:
        excesses.append(f"median function: {median:g} lines, at most {MEDIAN}")
    if tenth > NINE_TENTHS:
        longest = ", ".join(f"{x.where} ({x.lines})" for x in sorted(functions)[-10:])
        excesses.append(
            f"a tenth of the functions has {tenth} lines or more, at most {NINE_TENTHS}"
        )
        excesses.append(f"longest: {longest}")
    excesses += [
        f"{x.where}: {x.lines} lines of code, at most {FUNCTION}"
        for x in functions
        if x.lines > FUNCTION
    ]
    for file in files:
        if (count := len(file.read_text().splitlines())) > FILE:
            excesses.append(f"{file.relative_to(SOURCE)}: {count} lines, at most {FILE}")
    print("\n".join(excesses))
    return bool(excesses)


def function_lengths(file: Path) -> list[Length]:
    """Every function of a file with its lines of code."""
    text = file.read_text()
    code = code_lines(text)
    name = file.relative_to(SOURCE) if file.is_relative_to(SOURCE) else file.name
    lengths = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = code & span(node)
            for inner in ast.walk(node):
                if inner is not node and isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines -= span(inner)
            lines -= docstring(node)
            lengths.append(Length(len(lines), f"{name}:{node.lineno} {node.name}"))
    return lengths


def code_lines(text: str) -> set[int]:
    """Numbers of the lines on which a token of code lies."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines


def span(node: ast.stmt | ast.expr) -> set[int]:
    """Numbers of the lines of a node, from its name to its end."""
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[int]:
    """Numbers of the lines of a function's docstring."""
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is None or not isinstance(first, ast.Expr):
        return set()
    return span(first)


if __name__ == "__main__":
    sys.exit(main())
