"""Tables of tile sizes, warps and pipeline stages, by architecture, kernel and size of a call.

tile_sizes.py looks a call up in them: its row is the first that is made for calls as large. A table
that is made of another says only in what it differs.
"""

# Registers of a multiprocessor.
REGISTERS = 65536
# The most that a thread can have.
MOST_REGISTERS = 255


# By kernel, and then by the most bytes of an element and the most key channels: a configuration.
Table = dict[str, dict[tuple[int, int], dict[str, int]]]


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
        kernel: {size: most(config) | config for size, config in rows.items()}
        for kernel, rows in table.items()
    }


def most(config: dict[str, int]) -> dict[str, int]:
    """The registers that a thread may have where one block has a multiprocessor to itself."""
    return {"maxnreg": min(REGISTERS // (32 * config["num_warps"]), MOST_REGISTERS)}


# Two products in a row keep a whole operand in registers before sm_90, so tiles are small there.
# AMPERE is for the 163 KiB of shared memory of a block of sm_80, SMALL for 99 KiB. Both scans of
# decayed rows:
DECAYED = {(2, 128): scan(64, 32, 8, 2), (2, 256): scan(64, 32, 8, 1), (4, 256): scan(64, 16, 8, 1)}
AMPERE: Table = {
    "pair_scores": {(2, 128): no_loop(4), (4, 256): no_loop(8)},
    "next_state": {
        (2, 128): scan(64, 64, 8, 2), (2, 256): scan(64, 32, 8, 2),
        (4, 128): scan(32, 16, 8, 1), (4, 256): scan(16, 16, 8, 1),
    },
    "next_state_backward": {
        (2, 64): scan(64, 64, 8, 1), (2, 128): scan(64, 64, 8, 2),
        (2, 256): scan(64, 32, 8, 2), (4, 256): scan(64, 16, 8, 1),
    },
    "next_state_decayed": DECAYED,
    "next_state_backward_decayed": DECAYED,
    "gradients": {(2, 256): slices(32, 64, 8, 1), (4, 256): slices(16, 64, 8, 1)},
    "exact_scores": {(4, 256): pairs(4, 16)},
    "fast_scores": {(4, 256): deep(4, 32)},
    "free_scores": {(4, 256): deep(8, 32)},
    "pair_gradients": {(2, 256): loop(64, 4, 1), (4, 256): loop(16, 8, 1)},
    "exact_gradients": {(4, 256): channels(4, 16, 64)},
    "fast_gradients": {(2, 256): slices(32, 32, 8, 1), (4, 256): slices(16, 32, 8, 1)},
    "free_gradients": {(2, 256): slices(32, 32, 8, 1), (4, 256): slices(16, 32, 8, 1)},
}  # fmt: skip
SMALL: Table = AMPERE | {
    "next_state": AMPERE["next_state"] | {(2, 256): scan(64, 32, 8, 1)},
    "next_state_backward": AMPERE["next_state_backward"] | {(2, 256): scan(64, 32, 4, 1)},
    "next_state_decayed": DECAYED | {(2, 128): scan(64, 32, 4, 1)},
    "next_state_backward_decayed": DECAYED
    | {(2, 128): scan(64, 32, 4, 1), (2, 256): scan(64, 16, 8, 1)},
}
# 227 KiB. Both scans of a free erase:
FREE = {
    (2, 64): scan(64, 128, 8, 2), (2, 128): scan(64, 64, 4, 2),
    (2, 256): scan(64, 32, 8, 1), (4, 256): scan(64, 16, 8, 1),
}  # fmt: skip
HOPPER: Table = AMPERE | {
    "pair_scores": {
        (2, 128): {**no_loop(4), "maxnreg": 128}, (2, 256): no_loop(4), (4, 256): no_loop(8),
    },
    "next_state": AMPERE["next_state"]
    | {(2, 128): scan(64, 128, 8, 3), (2, 256): scan(64, 64, 8, 2)},
    "next_state_backward": {
        (2, 128): scan(64, 128, 8, 3), (2, 256): scan(64, 32, 8, 2), (4, 256): scan(64, 16, 8, 1),
    },
    # Tiles of larger keys, and of float32, have 64 rows or fewer anyway.
    "next_state_narrow": {(2, 128): scan(64, 64, 4, 3)},
    "next_state_backward_narrow": {(2, 128): scan(64, 64, 4, 3)},
    "next_state_uneven": {(2, 128): scan(64, 64, 4, 2)},
    "next_state_decayed": {
        (2, 64): scan(64, 128, 8, 3), (2, 128): scan(64, 128, 8, 2),
        (2, 256): scan(64, 32, 8, 1), (4, 256): scan(64, 16, 8, 1),
    },
    "next_state_backward_decayed": DECAYED | {(2, 128): scan(64, 128, 8, 2)},
    "next_state_free": FREE,
    "next_state_backward_free": FREE,
    "gradients": {
        (2, 256): slices(64, 64, 4, 2),
        (4, 128): slices(32, 64, 8, 1), (4, 256): slices(16, 64, 8, 1),
    },
    "exact_scores": {(2, 256): pairs(4, 32), (4, 256): pairs(4, 16)},
    "fast_scores": {(4, 256): deep(4, 64)},
    "fast_gradients": AMPERE["fast_gradients"] | {(2, 256): slices(64, 64, 4, 3)},
    "free_scores": {(4, 256): {**deep(4, 32), "num_stages": 2}},
    "free_gradients": AMPERE["free_gradients"] | {(2, 256): slices(64, 64, 4, 2)},
    "pair_gradients_free": {(2, 128): loop(128, 8, 1)},
    # With 4 warps the assembler puts products of float32 inputs in series.
    "exact_gradients": {(2, 256): channels(4, 16, 64), (4, 256): channels(8, 16, 64)},
}  # fmt: skip

# Of float32. With 8 warps to 16 rows of a state a program mostly splits operands into their parts.
SCAN = {(4, 32): scan(32, 32, 2, 2), (4, 64): scan(32, 64, 4, 3), (4, 128): scan(32, 128, 8, 2)}
FLOAT32: Table = {
    "pair_scores_float32": {(4, 32): no_loop(1), (4, 128): no_loop(2)},
    "next_state_float32": SCAN,
    "next_state_narrow": HOPPER["next_state_narrow"] | SCAN | {(4, 128): scan(32, 32, 4, 2)},
    "next_state_backward_float32": {
        (4, 32): scan(32, 32, 2, 2), (4, 64): scan(32, 64, 4, 3), (4, 128): scan(32, 32, 4, 2),
    },
    "gradients_float32": {
        (4, 32): slices(16, 32, 2, 2), (4, 64): slices(32, 64, 4, 3),
        (4, 128): slices(16, 64, 4, 2),
    },
}  # fmt: skip

# Products leave their sums in tensor memory, of 512 columns, unless warps are fewer than 4 or more
# than 8: tiles that fit there, or warps that go without. Compiled ahead, and never timed.
BLACKWELL: Table = HOPPER | {
    "next_state_backward_narrow": {(2, 128): scan(64, 64, 8, 3)},
    "pair_scores": {(2, 256): no_loop(4), (4, 256): no_loop(8)},
    "next_state_backward": HOPPER["next_state_backward"] | {(2, 128): scan(64, 64, 8, 3)},
    "next_state_backward_decayed": HOPPER["next_state_backward_decayed"]
    | {(2, 128): scan(64, 64, 4, 2)},
    "exact_scores": HOPPER["exact_scores"] | {(4, 256): pairs(2, 16)},
    "free_gradients": AMPERE["free_gradients"],
    "pair_gradients": HOPPER["pair_gradients"] | {(4, 256): loop(16, 2, 1)},
    "exact_gradients": {
        (2, 256): channels(4, 16, 64), (4, 128): channels(8, 16, 64),
        (4, 256): {**channels(16, 16, 16), "maxnreg": 128},
    },
}  # fmt: skip

# An architecture between two takes the nearest below it.
TABLES: dict[int, Table] = {
    80: bounded(AMPERE), 86: SMALL, 89: SMALL, 90: HOPPER | FLOAT32,
    100: bounded(BLACKWELL), 120: bounded(SMALL),
}  # fmt: skip
