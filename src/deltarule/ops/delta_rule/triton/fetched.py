"""Which arguments of the kernels the copy engine fetches, and in which tiles.

By the name of an argument: columns of the matrix that it is, and the tile; from the constants that
the kernel is compiled with.
"""

from collections.abc import Mapping
from typing import Any

from deltarule.ops.runtime.tensor_maps import Tiles


def score_tiles(c: Mapping[str, Any]) -> Tiles:
    width = c["H"] * c["K"]
    return {"q": (width, [c["BQ"], c["K"]]), "k": (width, [c["BT"], c["K"]])}


def scan_tiles(c: Mapping[str, Any]) -> dict[str, tuple[int, list[int]]]:
    rows, reads, keys = c["BT"], c["BQ"], c["K"]
    square, reading, row = (rows, [rows, rows]), (rows, [reads, rows]), (keys, [rows, keys])
    width = keys if c["DECAYED"] else c["H"] * keys
    return {
        "q": (width, [reads, keys]), "k": (width, [rows, keys]), "erase": row, "write": row,
        "scores": reading, "value_scores": reading, "corrections": square, "from_values": square,
        "scalings": (rows, [1, rows]), "readings": (rows, [1, reads]),
    }  # fmt: skip


def forward_tiles(c: Mapping[str, Any]) -> Tiles:
    width = c["HV"] * c["V"]
    o = {"o": (width, [c["BQ"], c["BV"]])} if c["TMA_STORE"] else {}
    return scan_tiles(c) | {"v": (width, [c["BT"], c["BV"]])} | o


def backward_tiles(c: Mapping[str, Any]) -> Tiles:
    width = c["HV"] * c["V"]
    d_v = {"d_v": (width, [c["BT"], c["BV"]])} if c["TMA_STORE"] else {}
    return scan_tiles(c) | {"d_o": (width, [c["BQ"], c["BV"]])} | d_v


def gradient_tiles(c: Mapping[str, Any]) -> Tiles:
    rows, width = [c["BT"], c["BV"]], c["HV"] * c["V"]
    state = c["K"], [c["BV"], c["BC"]]
    return {
        "v": (width, rows), "d_o": (width, rows), "errors": (c["V"], rows),
        "d_errors": (c["V"], rows), "states": state, "d_states": state,
    }  # fmt: skip


def fast_tiles(c: Mapping[str, Any]) -> Tiles:
    rows, some = [c["BT"], c["BV"]], [c["BT"], c["BC"]]
    values, inner = (c["HV"] * c["V"], rows), (c["V"], rows)
    keys, decays = (c["H"] * c["K"], some), (c["HV"] * c["K"], some)
    state = c["K"], [c["BV"], c["BC"]]
    return {
        "v": values, "d_o": values, "d_v": values, "errors": inner, "d_errors": inner,
        "states": state, "d_states": state, "q": keys, "k": keys, "d_q": keys, "d_k": keys,
        "log_decay": decays, "d_log_decay": decays, "ones": (c["BT"], [c["BT"], c["BT"]]),
    }  # fmt: skip


def free_tiles(c: Mapping[str, Any]) -> Tiles:
    """With a free erase, whose dv other kernels have."""
    found = dict(fast_tiles(c))
    del found["d_v"]
    more = {"pairs": found["ones"]} | dict.fromkeys(("a", "b", "d_a", "d_b"), found["log_decay"])
    return found | more


def free_score_tiles(c: Mapping[str, Any]) -> Tiles:
    some, square = [c["BT"], c["BC"]], (c["BT"], [c["BT"], c["BT"]])
    keys, heads, decayed = (c["H"] * c["K"], some), (c["HV"] * c["K"], some), (c["K"], some)
    return {
        **dict.fromkeys(("q", "k"), keys), **dict.fromkeys(("a", "b", "decays"), heads),
        **dict.fromkeys(("decayed_q", "decayed_k", "erase", "write"), decayed),
        **dict.fromkeys(("ones", "scores", "value_scores", "corrections", "from_values"), square),
    }  # fmt: skip
