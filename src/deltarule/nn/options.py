"""Signatures and docstrings of layers: of the one constructor, the options that each takes."""

import inspect
import re
from typing import Any

ALWAYS = ("hidden_size", "num_heads")


def document(layer: Any, base: Any) -> None:
    """Let `help` show the arguments that a layer takes; base has the constructor and says all."""
    parameters = dict(list(inspect.signature(layer.__init__).parameters.items())[1:])
    if layer.__init__ is base.__init__ and hasattr(layer, "rule"):
        parameters = {
            name: parameter for name, parameter in parameters.items()
            if name in ALWAYS or layer.takes(name)
        }  # fmt: skip
        if layer.__doc__ and base.__doc__ and "Args:" not in layer.__doc__:
            layer.__doc__ = with_arguments(layer.__doc__, base.__doc__, list(parameters))
    layer.__signature__ = inspect.Signature(list(parameters.values()))


def with_arguments(text: str, source: str, names: list[str]) -> str:
    """Put what a docstring says of the named arguments into another, before its example."""
    section = re.search(r"    Args:\n(.*?)\n\n", source, re.DOTALL)
    if section is None:
        return text
    entries = re.split(r"\n(?= {8}\w)", section[1])
    chosen = [entry for entry in entries if entry.strip().partition(":")[0] in names]
    arguments = "\n".join(["    Args:", *chosen])
    head, found, tail = text.partition("    Examples:\n")
    return f"{head}{arguments}\n\n{found}{tail}" if found else f"{text.rstrip()}\n\n{arguments}\n"
