"""Launches that look up by name what a kernel's parameters ask for."""

from collections.abc import Hashable, Mapping
from typing import Any

from deltarule.ops.runtime.launch import MOST, OPTIONS, Grid, Launch

# What a launch may choose besides a kernel's constants.
CHOICES = (*OPTIONS, "num_warps", "num_stages", "maxnreg", "launch_pdl")
# By kernel and constants; each holds its kernel, so that the id stays its own.
launches: dict[Hashable, Launch] = {}
_parameters: dict[int, tuple[tuple[str, ...], frozenset[str], Any]] = {}


def launch(kernel: Any, grid: Grid, values: Mapping[str, Any]) -> None:
    """Run a kernel on the values that its parameters name, with the options that are among them.

    All calls with the same constants, each of which has one type, share one `Launch`.
    """
    asked, known = parameters(kernel)
    key = id(kernel), *map(values.get, known)
    if (found := launches.get(key)) is None:
        if len(launches) >= MOST:
            launches.clear()
        found = launches[key] = Launch(kernel, {x: values[x] for x in known if x in values})
    found(grid, *[values[name] for name in asked])


def parameters(kernel: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    """What a kernel is given in every launch, in order; and its constants and options."""
    # A kernel's own hash is that of its source.
    if (found := _parameters.get(id(kernel))) is None:
        names, types = list(kernel.arg_names), kernel.fn.__annotations__
        first = next((i for i, name in enumerate(names) if name in types), len(names))
        found = tuple(names[:first]), frozenset([*names[first:], *CHOICES]), kernel
        _parameters[id(kernel)] = found
    return found[:2]
