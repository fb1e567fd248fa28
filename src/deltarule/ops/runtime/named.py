"""Launches that look up a kernel's parameters by their names."""

from collections.abc import Hashable, Mapping
from typing import Any

from deltarule.ops.runtime.launch import MOST, Grid, Launch, parameters
from deltarule.ops.runtime.tensor_maps import Tiles

# By kernel and constants; each holds its kernel, so that the id stays its own.
launches: dict[Hashable, Launch] = {}


def launch(
    kernel: Any, grid: Grid, values: Mapping[str, Any], tiles: Tiles | None = None,
    of: type[Launch] = Launch,
) -> None:  # fmt: skip
    """Run a kernel on the values that its parameters name, with the options that are among them.

    All calls with the same constants, each of which has one type, and tiles share one `Launch`.
    """
    asked, known = parameters(kernel)
    fetched = [(name, width, *tile) for name, (width, tile) in (tiles or {}).items()]
    key = id(kernel), *map(values.get, known), *fetched
    if (found := launches.get(key)) is None:
        if len(launches) >= MOST:
            launches.clear()
        constants = {x: values[x] for x in known if x in values}
        found = launches[key] = of(kernel, constants, tiles)
    found(grid, *[values[name] for name in asked])
