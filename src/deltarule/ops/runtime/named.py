"""Launches that look up a kernel's parameters by their names."""

from collections.abc import Hashable, Mapping
from typing import Any

from deltarule.ops.runtime.launch import MOST, Grid, Launch, parameters

# By kernel and constants; each holds its kernel, so that the id stays its own.
launches: dict[Hashable, Launch] = {}


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
