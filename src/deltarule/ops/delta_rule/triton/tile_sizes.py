"""Tile sizes, warps and pipeline stages of every kernel over chunks, from the fixed tables of
tile_tables.py: no search.

A configuration is a function of the GPU's architecture, the size of an element, the key and value
sizes, the erase, whether the scans read q and k with their decays, and whether heads and sequences
are so few that tiles of the state are narrow.
"""

from functools import cache
from typing import NamedTuple

import torch

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.tile_tables import TABLES, Table

# What the interpreter is given on a machine without a GPU.
INTERPRETED = 90
# Rows of a chunk where no row of a table says otherwise.
ROWS = 64


class TileKey(NamedTuple):
    """What a configuration depends on."""

    architecture: int
    element_bytes: int
    key_size: int
    value_size: int
    erase: str
    # The scans read q and k already multiplied by the decays of their channels.
    decayed: bool
    # Tiles of half the rows of a state, so that twice as many programs go through the chunks.
    narrow: bool = False


def tile_key(inputs: Inputs) -> TileKey:
    """The part of a call that its configurations depend on."""
    q, value_size = inputs.q, inputs.v.shape[-1]
    sizes = q.element_size(), q.shape[-1], value_size
    return TileKey(architecture(q.device), *sizes, inputs.erase, inputs.by_channel)


def architecture(device: torch.device) -> int:
    """Ten times the compute capability: 90 for an H200."""
    return INTERPRETED if device.type != "cuda" else _architecture(device.index or 0)


@cache
def _architecture(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def table_of(architecture: int) -> Table:
    """The package's table of an architecture, or of the nearest below it that has one."""
    below = [known for known in TABLES if known <= architecture]
    return TABLES[max(below, default=min(TABLES))]


def row_of(kernel: str, call: TileKey) -> dict[str, int]:
    """The table's row: decayed q and k, narrow tiles, 192 values and float32 may have others."""
    table = table_of(call.architecture)
    kinds = {"_free": call.erase == "free", "_decayed": call.decayed, "_narrow": call.narrow}
    # Of a second tile of 128 values half or more would be empty.
    empty = call.value_size > 128 and 0 < call.value_size % 128 <= 64
    kinds |= {"_uneven": empty and call.erase == "tied", "_float32": call.element_bytes == 4}
    for kind in (*[kind for kind, of in kinds.items() if of], ""):
        for (element_bytes, key_size), config in table.get(kernel + kind, {}).items():
            if call.element_bytes <= element_bytes and call.key_size <= key_size:
                return config
    raise KeyError(kernel)


@cache
def configuration(kernel: str, call: TileKey) -> dict[str, int]:
    """Warps, stages and tile sizes of a kernel, not to be changed by the caller.

    Its tile is no larger than the values of the call need.
    """
    config = dict(row_of(kernel, call))
    config.pop("BT", None)
    if "BV" in config and (block := power_of_two(call.value_size)) < config["BV"]:
        warps = config["num_warps"]
        config["num_warps"] = max(warps * block // config["BV"], min(warps, 4))
        config["BV"] = block
    return config


@cache
def chunk_rows(call: TileKey) -> int:
    """Rows of a chunk: fewer where tiles of full width would not fit."""
    return ROWS if call.decayed else row_of("next_state", call).get("BT", ROWS)


def power_of_two(size: int) -> int:
    """The least power of two that is not below the size, and 16 at the least."""
    return max(1 << (size - 1).bit_length(), 16)
