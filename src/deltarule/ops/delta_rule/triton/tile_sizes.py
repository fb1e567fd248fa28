"""Tile sizes, warps and pipeline stages of every kernel over chunks: fixed tables, no search.

A configuration is a function of the GPU's architecture, the size of an element, the key and value
sizes, the erase, whether the scans read scaled copies of q and k, and whether heads and sequences
are so few that tiles of the state are narrow.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.tables import TABLES, Row

# What the interpreter is given on a machine without a GPU.
INTERPRETED = 90
# Rows of a chunk where no row of a table says otherwise.
ROWS = 64


class Call(NamedTuple):
    """What a configuration depends on."""

    architecture: int
    element_bytes: int
    key_size: int
    value_size: int
    erase: str
    copies: bool
    # Tiles of half the rows of a state, so that twice as many programs go through the chunks.
    narrow: bool = False


def call_of(inputs: Inputs) -> Call:
    """The part of a call that its configurations depend on."""
    return Call(
        architecture(inputs.q.device), inputs.q.element_size(), inputs.q.shape[-1],
        inputs.v.shape[-1], inputs.erase, inputs.by_channel,
    )  # fmt: skip


def architecture(device: torch.device) -> int:
    """Ten times the compute capability: 90 for an H200."""
    return INTERPRETED if device.type != "cuda" else _architecture(device.index or 0)


@cache
def _architecture(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def table_of(architecture: int) -> dict[str, tuple[Row, ...]]:
    """The package's table of an architecture, or of the nearest below it that has one."""
    below = [known for known in TABLES if known <= architecture]
    return TABLES[max(below, default=min(TABLES))]


@cache
def configuration(kernel: str, call: Call) -> dict[str, int]:
    """The configuration of a kernel for a call, its tile no larger than the values need.

    Returns:
        Warps, stages and tile sizes as the kernel takes them; not to be changed.
    """
    kernel = variant(kernel, call)
    config = dict(_overrides.get(kernel) or shipped(kernel, call))
    config.pop("BT", None)
    if "BV" in config and (block := power_of_two(call.value_size)) < config["BV"]:
        config["num_warps"] = max(
            config["num_warps"] * block // config["BV"], min(config["num_warps"], 4)
        )
        config["BV"] = block
    return config


def variant(kernel: str, call: Call) -> str:
    """The name in the table: scans over copies, or in narrow tiles, may have rows of their own."""
    kinds = {"free": call.erase == "free", "copies": call.copies, "narrow": call.narrow}
    table = table_of(call.architecture)
    names = [f"{kernel}_{kind}" for kind, of in kinds.items() if of]
    found = (name for name in names if any(row.fits(call) for row in table.get(name, ())))
    return next(found, kernel)


def shipped(kernel: str, call: Call) -> dict[str, int]:
    """The package's configuration, as its table has it."""
    return next(row.config for row in table_of(call.architecture)[kernel] if row.fits(call))


def has_own(call: Call, *kernels: str) -> bool:
    """Whether one of the kernels has a configuration for the call that is not the package's."""
    names = [variant(kernel, call) for kernel in kernels]
    return any(name in _overrides for name in names)


@cache
def chunk_rows(call: Call) -> int:
    """Rows of a chunk: fewer where tiles of full width would not fit."""
    if call.copies:
        return ROWS
    return shipped("next_state", call).get("BT", ROWS)


# What is kept of calls, and holds configurations: the plans that plan.py makes, and the launches
# that recording.py wrote down.
plans: dict[Hashable, Any] = {}
recordings: dict[Hashable, Any] = {}
MOST_RECORDINGS = 512
_overrides: dict[str, dict[str, int]] = {}


@contextmanager
def overridden(kernel: str, config: dict[str, int]) -> Iterator[None]:
    """Inside, a kernel is launched with this configuration, whatever the tables say."""
    _overrides[kernel] = config
    forget()
    try:
        yield
    finally:
        del _overrides[kernel]
        forget()


def remember(key: Hashable, recording: Any) -> None:
    """Keep what is known of the launches of a kind of calls."""
    if len(recordings) >= MOST_RECORDINGS:
        recordings.clear()
    recordings[key] = recording


def forget() -> None:
    """Look configurations up again, and plan anew."""
    configuration.cache_clear()
    plans.clear()
    recordings.clear()


def power_of_two(size: int) -> int:
    """The least power of two that is not below the size, and 16 at the least."""
    return max(1 << (size - 1).bit_length(), 16)
