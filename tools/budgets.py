"""Budgets on length: of functions, of files, and of every folder as a whole.

Half the functions keep within 12 lines, nine tenths within 40, all within 90; a file keeps within
350, one of kernels or of an operator's chunked form within 500; folders keep within `FOLDERS`.

A function's lines are those that hold code: its signature counts; docstring, comments and blank
lines do not, nor do functions inside it, which are counted on their own.
"""

import ast
import io
import re
import statistics
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# What is counted: the package, and what stands beside it.
SOURCES = ("src", "experiments", "bench")

MEDIAN = 12
NINE_TENTHS = 40
FUNCTION = 90
FILE, LONG_FILE = 350, 500
# Where a file may be long: one algorithm reads better in one piece.
LONG = re.compile(r"/(torch|triton|gluon)(/|\.py$)|_triton\.py$")

# Lines of all files of a folder together, comments and docstrings included.
FOLDERS = {
    "src/deltarule": 50_790,
    "src/deltarule/ops": 25_470,
    "src/deltarule/ops/runtime": 1_190,
    "src/deltarule/ops/delta_rule": 13_290,
    "src/deltarule/ops/context": 520,
    "src/deltarule/ops/selective_scan": 1_120,
    "src/deltarule/ops/mesa": 590,
    "src/deltarule/ops/memory": 1_900,
    "src/deltarule/ops/fused": 2_710,
    "src/deltarule/ops/serving": 770,
    "src/deltarule/ops/slstm": 820,
    "src/deltarule/ops/long_convolution": 490,
    "src/deltarule/nn": 8_690,
    "src/deltarule/models": 5_200,
    "src/deltarule/hf": 1_500,
    "src/deltarule/parallel": 1_310,
    "src/deltarule/train": 4_760,
    "src/deltarule/tasks": 1_370,
    "experiments": 3_800,
    "bench": 2_850,
}

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
    files = sorted(file for name in SOURCES for file in (ROOT / name).rglob("*.py"))
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
    counts = {file.relative_to(ROOT).as_posix(): lines_of(file) for file in files}
    for name, count in counts.items():
        if count > (most := LONG_FILE if LONG.search(name) else FILE):
            excesses.append(f"{name}: {count} lines, at most {most}")
    for folder, most in FOLDERS.items():
        count = sum(lines for name, lines in counts.items() if name.startswith(f"{folder}/"))
        print(f"{folder}: {count} of {most} lines")
        if count > most:
            excesses.append(f"{folder}: {count} lines, at most {most}")
    print("\n".join(excesses))
    return bool(excesses)


def lines_of(file: Path) -> int:
    """Lines of a file, whatever they hold."""
    return len(file.read_text().splitlines())


def function_lengths(file: Path) -> list[Length]:
    """Every function of a file with its lines of code."""
    text = file.read_text()
    code = code_lines(text)
    name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name
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
