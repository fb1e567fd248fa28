"""Tables of tile sizes, warps and pipeline stages, by architecture, kernel and size of a call.

tile_sizes.py looks a call up in them: its row is the first that is made for calls as large.
"""

from typing import NamedTuple

# Registers of a multiprocessor.
REGISTERS = 65536
# The most that a thread can have.
MOST_REGISTERS = 255


class Row(NamedTuple):
    """A configuration for elements of at most so many bytes and at most so many key channels."""

    element_bytes: int
    key_size: int
    config: dict[str, int]


Table = dict[str, tuple[Row, ...]]


def no_loop(warps: int) -> dict[str, int]:
    return {"num_warps": warps, "num_stages": 1}


def scan(rows: int, block: int, warps: int, stages: int) -> dict[str, int]:
    """A scan over chunks: rows of a chunk, rows of the state, warps, stages."""
    return {"BT": rows, "BV": block, "num_warps": warps, "STAGES": stages}


def loop(block: int, warps: int, stages: int) -> dict[str, int]:
    """A kernel that goes through the values of one chunk."""
    return {"BV": block, "num_warps": warps, "num_stages": stages}


def slices(block: int, at_once: int, warps: int, stages: int) -> dict[str, int]:
    """Gradients that take so many channels in a program, and go through the values."""
    return {**loop(block, warps, stages), "BC": at_once}


def channels(warps: int, at_once: int, block: int) -> dict[str, int]:
    """Gradients that go through so many key channels, and so many values, at once."""
    return {**no_loop(warps), "BC": at_once, "BV": block}


def pairs(warps: int, at_once: int) -> dict[str, int]:
    """Scores that go through so many key channels at once, and 16 below the bar."""
    return {**no_loop(warps), "BC": at_once, "BN": 16}


def deep(warps: int, at_once: int) -> dict[str, int]:
    """Fast scores: so many key channels at once, 4 rows in a thread."""
    return {**no_loop(warps), "BC": at_once, "DEEP": 4}


def bounded(table: Table) -> Table:
    """The table, every kernel with the registers that a thread may have at most.

    Where it is not told, the assembler may fall to 32 or 40, and spill 10 KB.
    """
    return {
        kernel: tuple(row._replace(config=most(row.config) | row.config) for row in rows)
        for kernel, rows in table.items()
    }


def most(config: dict[str, int]) -> dict[str, int]:
    """The registers that a thread may have where one block has a multiprocessor to itself."""
    return {"maxnreg": min(REGISTERS // (32 * config["num_warps"]), MOST_REGISTERS)}


# Two products in a row keep a whole operand in registers before sm_90, so tiles are small there.
# The first is for the 163 KiB of shared memory of a block of sm_80, the other for 99 KiB.
AMPERE: Table = {
    "pair_scores": (Row(2, 128, no_loop(4)), Row(4, 256, no_loop(8))),
    "next_state": (
        Row(2, 128, scan(64, 64, 8, 2)), Row(2, 256, scan(64, 32, 8, 2)),
        Row(4, 128, scan(32, 16, 8, 1)), Row(4, 256, scan(16, 16, 8, 1)),
    ),
    "next_state_backward": (
        Row(2, 64, scan(64, 64, 8, 1)), Row(2, 128, scan(64, 64, 8, 2)),
        Row(2, 256, scan(64, 32, 8, 2)), Row(4, 256, scan(64, 16, 8, 1)),
    ),
    "next_state_decayed": (
        Row(2, 128, scan(64, 32, 8, 2)), Row(2, 256, scan(64, 32, 8, 1)),
        Row(4, 256, scan(64, 16, 8, 1)),
    ),
    "next_state_backward_decayed": (
        Row(2, 128, scan(64, 32, 8, 2)), Row(2, 256, scan(64, 32, 8, 1)),
        Row(4, 256, scan(64, 16, 8, 1)),
    ),
    "gradients": (
        Row(2, 256, slices(32, 64, 8, 1)), Row(4, 256, slices(16, 64, 8, 1)),
    ),
    "exact_scores": (Row(4, 256, pairs(4, 16)),),
    "fast_scores": (Row(4, 256, deep(4, 32)),),
    "pair_gradients": (Row(2, 256, loop(64, 4, 1)), Row(4, 256, loop(16, 8, 1))),
    "exact_gradients": (Row(4, 256, channels(4, 16, 64)),),
    "fast_gradients": (Row(2, 256, slices(32, 32, 8, 1)), Row(4, 256, slices(16, 32, 8, 1))),
}  # fmt: skip
SMALL: Table = AMPERE | {
    "next_state": (
        Row(2, 128, scan(64, 64, 8, 2)), Row(2, 256, scan(64, 32, 8, 1)),
        Row(4, 128, scan(32, 16, 8, 1)), Row(4, 256, scan(16, 16, 8, 1)),
    ),
    "next_state_backward": (
        Row(2, 64, scan(64, 64, 8, 1)), Row(2, 128, scan(64, 64, 8, 2)),
        Row(2, 256, scan(64, 32, 4, 1)), Row(4, 256, scan(64, 16, 8, 1)),
    ),
    "next_state_decayed": (
        Row(2, 128, scan(64, 32, 4, 1)), Row(2, 256, scan(64, 32, 8, 1)),
        Row(4, 256, scan(64, 16, 8, 1)),
    ),
    "next_state_backward_decayed": (
        Row(2, 128, scan(64, 32, 4, 1)), Row(2, 256, scan(64, 16, 8, 1)),
        Row(4, 256, scan(64, 16, 8, 1)),
    ),
}  # fmt: skip
# 227 KiB.
HOPPER: Table = AMPERE | {
    "pair_scores": (
        Row(2, 128, {**no_loop(4), "maxnreg": 128}), Row(2, 256, no_loop(4)),
        Row(4, 256, no_loop(8)),
    ),
    "next_state": (
        Row(2, 128, scan(64, 128, 8, 3)), Row(2, 256, scan(64, 64, 8, 2)),
        Row(4, 128, scan(32, 16, 8, 1)), Row(4, 256, scan(16, 16, 8, 1)),
    ),
    "next_state_backward": (
        Row(2, 128, scan(64, 128, 8, 3)), Row(2, 256, scan(64, 32, 8, 2)),
        Row(4, 256, scan(64, 16, 8, 1)),
    ),
    # Tiles of larger keys, and of float32, have 64 rows or fewer anyway.
    "next_state_narrow": (Row(2, 128, scan(64, 64, 4, 3)),),
    "next_state_backward_narrow": (Row(2, 128, scan(64, 64, 4, 3)),),
    "next_state_decayed": (
        Row(2, 64, scan(64, 128, 8, 3)), Row(2, 128, scan(64, 128, 8, 2)),
        Row(2, 256, scan(64, 32, 8, 1)), Row(4, 256, scan(64, 16, 8, 1)),
    ),
    "next_state_free": (
        Row(2, 64, scan(64, 128, 8, 2)), Row(2, 128, scan(64, 64, 4, 2)),
        Row(2, 256, scan(64, 32, 8, 1)), Row(4, 256, scan(64, 16, 8, 1)),
    ),
    "next_state_backward_decayed": (
        Row(2, 128, scan(64, 128, 8, 2)),
        Row(2, 256, scan(64, 32, 8, 1)), Row(4, 256, scan(64, 16, 8, 1)),
    ),
    "next_state_backward_free": (
        Row(2, 64, scan(64, 128, 8, 2)), Row(2, 128, scan(64, 64, 4, 2)),
        Row(2, 256, scan(64, 32, 8, 1)), Row(4, 256, scan(64, 16, 8, 1)),
    ),
    "gradients": (
        Row(2, 256, slices(64, 64, 4, 2)),
        Row(4, 128, slices(32, 64, 8, 1)), Row(4, 256, slices(16, 64, 8, 1)),
    ),
    "exact_scores": (Row(2, 256, pairs(4, 32)), Row(4, 256, pairs(4, 16))),
    "fast_scores": (Row(4, 256, deep(4, 64)),),
    "fast_gradients": (
        Row(2, 256, slices(64, 64, 4, 3)), Row(4, 256, slices(16, 32, 8, 1)),
    ),
    # With 4 warps the assembler puts products of float32 inputs in series.
    "exact_gradients": (Row(2, 256, channels(4, 16, 64)), Row(4, 256, channels(8, 16, 64))),
}  # fmt: skip

# Products leave their sums in tensor memory, of 512 columns, unless warps are fewer than 4 or more
# than 8: tiles that fit there, or warps that go without. Compiled ahead, and never timed.
BLACKWELL: Table = HOPPER | {
    "next_state_backward_narrow": (Row(2, 128, scan(64, 64, 8, 3)),),
    "pair_scores": (Row(2, 256, no_loop(4)), Row(4, 256, no_loop(8))),
    "next_state_backward": (
        Row(2, 128, scan(64, 64, 8, 3)), Row(2, 256, scan(64, 32, 8, 2)),
        Row(4, 256, scan(64, 16, 8, 1)),
    ),
    "next_state_backward_decayed": (
        Row(2, 128, scan(64, 64, 4, 2)),
        Row(2, 256, scan(64, 32, 8, 1)), Row(4, 256, scan(64, 16, 8, 1)),
    ),
    "exact_scores": (Row(2, 256, pairs(4, 32)), Row(4, 256, pairs(2, 16))),
    "pair_gradients": (Row(2, 256, loop(64, 4, 1)), Row(4, 256, loop(16, 2, 1))),
    "exact_gradients": (
        Row(2, 256, channels(4, 16, 64)), Row(4, 128, channels(8, 16, 64)),
        Row(4, 256, {**channels(16, 16, 16), "maxnreg": 128}),
    ),
}  # fmt: skip

# An architecture between two takes the nearest below it.
TABLES: dict[int, Table] = {
    80: bounded(AMPERE), 86: SMALL, 89: SMALL, 90: HOPPER,
    100: bounded(BLACKWELL), 120: bounded(SMALL),
}  # fmt: skip
