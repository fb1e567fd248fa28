"""A compiled kernel is kept by what it reads: its constants are among that only by their own names.

Triton's key of a kernel holds the values of names that the kernel reads, but not of a module's
attributes: after a change of such a constant an old binary would run on.
"""

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from promised import promised

promised("triton")

import triton.language as tl
from triton.runtime.jit import JITFunction

import deltarule
from deltarule.ops.runtime.rows import row_names

FOLDER = Path(deltarule.__file__).parent
KERNELS = [file for file in sorted(FOLDER.rglob("*.py")) if "jit" in file.read_text()]


def read_through_modules(source: str, names: dict[str, object]) -> list[str]:
    """The constants that compiled functions of a file read as a module's attribute."""
    return [
        ast.unparse(node)
        for function in ast.parse(source).body
        if isinstance(function, ast.FunctionDef)
        and any("jit" in ast.unparse(one) for one in function.decorator_list)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and isinstance(of := names.get(node.value.id), ModuleType)
        and isinstance(getattr(of, node.attr, None), tl.constexpr)
    ]


def test_such_a_constant_is_seen() -> None:
    of = ModuleType("of")
    of.SIZE, of.made = tl.constexpr(4), abs
    source = "@triton.jit\ndef kernel(x):\n    of.made(x + of.SIZE)"
    assert read_through_modules(source, {"of": of}) == ["of.SIZE"]


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: str(file.relative_to(FOLDER)))
def test_kernels_read_constants_by_their_own_names(file: Path) -> None:
    path = ".".join(file.relative_to(FOLDER.parent).with_suffix("").parts)
    names = vars(importlib.import_module(path.removesuffix(".__init__")))
    assert read_through_modules(file.read_text(), names) == []


FACTOR = row_names("READ WRITE")


def kernel(x):
    tl.store(x, FACTOR.WRITE)


def test_a_kernel_is_kept_by_the_names_of_its_rows(monkeypatch) -> None:
    assert FACTOR.WRITE == 1
    key = JITFunction(kernel).cache_key
    assert JITFunction(kernel).cache_key == key
    monkeypatch.setitem(globals(), "FACTOR", row_names("WRITE READ"))
    assert JITFunction(kernel).cache_key != key
