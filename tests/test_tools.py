"""The checks of `tools/` find what they are for."""

import budgets
import call_length
import clones
import interfaces
import pytest

EXAMPLE = '''
def outer(
    x,
):
    """A docstring

    of three lines."""
    # A comment.

    def inner():
        return 1

    text = """two
    lines"""
    return inner() + x
'''


def test_function_lengths_count_code_only(tmp_path):
    file = tmp_path / "example.py"
    file.write_text(EXAMPLE)
    lengths = {x.where.split()[-1]: x.lines for x in budgets.function_lengths(file)}
    # outer: signature 3, text 2, return 1.
    assert lengths == {"outer": 6, "inner": 2}


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A source tree of its own for the checks."""
    for tool in (budgets, clones, interfaces):
        monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(budgets, "FOLDERS", {"src": 600})
    (tmp_path / "src").mkdir()
    return tmp_path / "src"


def test_budgets_hold_and_break(source, capsys):
    (source / "short.py").write_text("def f():\n    return 1\n")
    (source / "triton").mkdir()
    # Kernels may be long, folders only so much.
    (source / "triton" / "scan.py").write_text("x = 1\n" * 499)
    assert budgets.main() == 0
    for text, says in (
        ("def f():\n" + "    x = 1\n" * 95, "more.py:1 f: 96 lines of code, at most 90"),
        ("x = 1\n" * 351, "more.py: 351 lines, at most 350"),
        ("x = 1\n" * 200, "src: 701 lines, at most 600"),
        (("def f():\n" + "    x = 1\n" * 12 + "\n") * 3, "median function: 13 lines, at most 12"),
    ):
        (source / "more.py").write_text(text)
        assert budgets.main() == 1
        assert says in capsys.readouterr().out


def test_a_call_enters_the_files_whose_functions_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "entered_first.py").write_text("import entered_second\n\ndef f(x):\n    return x\n")
    (tmp_path / "entered_second.py").write_text("def g():\n    return 1\n")

    def call():
        from entered_first import f

        return max([1], key=f)

    assert call_length.entered(call, tmp_path) == {"entered_first.py": 4}


ALLOWED = """
def _f(**options): ...
class _C:
    def f(self, **options): ...
def f(*lengths, key=None): ...
x = {}.get('torch.load')
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (ALLOWED, 0), ("def f(**kwargs): ...", 1), ("class C:\n    def f(self, **options): ...", 1),
        ("class C:\n    def __init__(self, **options): ...", 1), ("import pickle", 1),
        ("def _f():\n    import pickle.whatever", 1), ("from pickle import loads", 1),
        ("from torch import load", 1), ("import torch\ntorch.load('x', weights_only=True)", 1),
        ("import numpy as np\nnp.load('x')", 1),
    ],
)  # fmt: skip
def test_forbidden_and_allowed_in_the_library(source, text, found):
    (source / "a.py").write_text(text)
    assert interfaces.main() == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f({}): ...", 1),
        ("@triton.jit\ndef scan({}): ...", 1),
        ("@triton.jit\ndef scan_kernel({}): ...", 0),
        ("@torch.library.custom_op('x')\ndef f({}): ...", 0),
        ("class C:\n    def __init__({}): ...", 0),
        ('def f({}):\n    """Documented.\n\n    Args:\n        x: One.\n    """', 0),
    ],
)
def test_a_private_function_has_12_parameters_at_most(source, text, found):
    (source / "deltarule").mkdir()
    names = [f"x{i}" for i in range(13)]
    for given, expected in ((names, found), (names[1:], 0)):
        for by_name in ([], ["*"]):
            text_of = text.format(", ".join([*given[:3], *by_name, *given[3:]]))
            (source / "deltarule" / "a.py").write_text(text_of)
            assert interfaces.main() == expected


def test_clones_are_counted(source):
    body = "".join(f"    y{i} = x + {i} * {i}\n" for i in range(10))
    (source / "a.py").write_text(f"def f(x):\n{body}")
    (source / "b.py").write_text("".join(f"z{i} = {i} ** 2\n" for i in range(50)))
    assert clones.main() == 0
    (source / "c.py").write_text(f"def g(x, longer):\n{body}")
    assert clones.main() == 1


def test_imports_and_signatures_are_no_clones(source):
    text = "from a import (\n" + "".join(f"    name{i},\n" for i in range(9)) + ")\n"
    text += "def f(\n" + "".join(f"    a{i}: int,\n" for i in range(9)) + "): ...\n"
    text += "f(\n" + "".join(f"    a{i}=a{i},\n" for i in range(9)) + ")\n"
    (source / "a.py").write_text(text)
    (source / "b.py").write_text(text)
    assert clones.main() == 0
