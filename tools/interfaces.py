"""What the library may not hold: open-ended public arguments, unpickling, long signatures.

`**kwargs` in a public signature hides a misspelt argument; a pickle runs whatever it was given; a
dozen values that go together are one value. Longer signatures are those of documented functions and
of constructors, which name what a user may give, of registered operators, whose schema they are,
and of kernels that are launched.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("src", "experiments", "bench")

UNPICKLING_MODULES = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "joblib", "marshal",
}  # fmt: skip
PARAMETERS = 12
# Functions that have more, and how many: these may only become fewer.
LONGER = {
    "hf/recurrence.py:mamba2_chunk_scan": 15,
    "models/generate.py:stream": 13,
    # What other libraries call has their signature.
    "serve/sglang.py:target_verify": 15,
    "serve/vllm.py:chunk_gated_delta_rule": 13,
    "serve/vllm.py:decode": 17,
}

# weights_only=True still reads a pickle.
UNPICKLING_CALLS = {"torch.load", "torch.serialization.load", "np.load", "numpy.load"}


def main() -> int:
    """Print every finding; 1 if there is any."""
    findings = [
        f"{file.relative_to(ROOT)}:{finding}"
        for name in SOURCES
        for file in sorted((ROOT / name).rglob("*.py"))
        for finding in check(file.read_text())
    ]
    findings += long_signatures()
    print("\n".join(findings) or "no **kwargs in public, no unpickling, no long signatures")
    return bool(findings)


def long_signatures() -> Iterator[str]:
    """Private functions of the package with too many parameters."""
    folder = ROOT / "src" / "deltarule"
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.FunctionDef) or not is_private(node):
                continue
            name, count = f"{file.relative_to(folder).as_posix()}:{node.name}", parameters(node)
            if count > (most := LONGER.get(name, PARAMETERS)):
                yield f"{name}: {count} parameters, at most {most}"


def parameters(function: ast.FunctionDef) -> int:
    """How many a function has."""
    arguments = function.args
    return len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])


def is_private(function: ast.FunctionDef) -> bool:
    """Whether nobody but the library needs its signature: no user, no operator, no launch."""
    decorators = " ".join(map(ast.unparse, function.decorator_list))
    launched = "jit" in decorators and function.name.endswith("_kernel")
    documented = "Args:" in (ast.get_docstring(function) or "") or function.name == "__init__"
    return not launched and not documented and "custom_op" not in decorators


def check(text: str) -> Iterator[str]:
    """Findings in one file, as `line: what`."""
    tree = ast.parse(text)
    for name, function in public_functions(tree):
        if function.args.kwarg is not None:
            yield f"{function.lineno}: {name} takes **{function.args.kwarg.arg}: name its arguments"
    for node in ast.walk(tree):
        yield from unpickling(node)


def public_functions(
    tree: ast.Module,
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions of the module and methods of its classes, but for names that start with _."""
    for node in tree.body:
        members = [node] if not isinstance(node, ast.ClassDef) else node.body
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        if prefix.startswith("_"):
            continue
        for member in members:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and (
                not member.name.startswith("_") or member.name in ("__init__", "__call__")
            ):
                yield prefix + member.name, member


def unpickling(node: ast.AST) -> Iterator[str]:
    """A finding if the node imports or calls something that unpickles."""
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        modules = [node.module or ""]
        if any(f"{node.module}.{alias.name}" in UNPICKLING_CALLS for alias in node.names):
            yield f"{node.lineno}: imports load from {node.module}, which unpickles"
    else:
        modules = []
    for module in modules:
        if module.partition(".")[0] in UNPICKLING_MODULES:
            yield f"{node.lineno}: imports {module}, which unpickles"  # type: ignore[attr-defined]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in UNPICKLING_CALLS:
        yield f"{node.lineno}: calls {ast.unparse(node.func)}, which unpickles"


if __name__ == "__main__":
    sys.exit(main())
