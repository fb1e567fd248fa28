"""The stages of a call: which kernels each launches, and what these leave for the stages after it.

`head_scores`, the scans, `add_gradients` and `through_norm`. With a decay per channel or a free
erase the scans and the norm alone: channel_stages.py has the others.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.gradients import decay_gradients_kernel, gradients_kernel
from deltarule.ops.delta_rule.triton.plan import (
    COPY_ENGINE,
    TENSOR_MEMORY,
    WHOLE,
    Call,
    Plan,
    Shapes,
    Window,
    blocks,
    full_tiles,
    inverse_precision,
)
from deltarule.ops.delta_rule.triton.scan import next_state_backward_kernel, next_state_kernel
from deltarule.ops.delta_rule.triton.scores import head_sums_kernel, pair_scores_kernel
from deltarule.ops.delta_rule.triton.segments import ends_configuration, segment_starts
from deltarule.ops.delta_rule.triton.tile_sizes import architecture, configuration
from deltarule.ops.delta_rule.triton.tiles import SCALINGS
from deltarule.ops.runtime.launch import Tiles
from deltarule.ops.runtime.unit_norm import unit_norm_gradients_kernel

# Rows of q or k that a program takes through the norm.
NORM_ROWS = 32
# What scans may take scores of: they round q . k before it is scaled, for which float16 has no
# range. With more key channels a tile of S has fewer values, and each would take them again.
SCORED_TYPES, SCORED_KEYS = (torch.bfloat16,), 128
# Heads whose decays a program adds up.
SUM_HEADS = 16


def on_hopper(x: Tensor) -> bool:
    """Whether x lies on a GPU with a copy engine and without tensor memory."""
    return architecture(x.device) in range(COPY_ENGINE, TENSOR_MEMORY)


def score_shapes(inputs: Inputs, plan: Plan) -> Shapes:
    """What the pairs of rows of every chunk leave; decay none or per head."""
    sizes, dtype = plan.sizes, inputs.q.dtype
    chunks, rows = (plan.chunks, sizes["HV"]), sizes["BT"]
    tied, scaled = inputs.beta is not None, inputs.log_decay is not None or inputs.normalize_qk
    shapes: Shapes = {}
    if not scans_score(inputs, plan):
        shapes["scores"] = (*chunks, sizes["BQ"], rows), dtype
    if tied:
        shapes["corrections"] = (*chunks, rows, rows), dtype
    if tied or scaled:
        shapes["scalings"] = (*chunks, SCALINGS.value, rows), torch.float32
    if inputs.log_decay is not None:
        shapes["chunk_decay"] = chunks, torch.float32
    return shapes


def scans_score(inputs: Inputs, plan: Plan) -> bool:
    """Whether the scans take q . k themselves: without decays, where one tile of S has all values.

    Elsewhere than on Hopper there are too few registers, or too little tensor memory, for it.
    """
    x, tile = inputs.v, configuration("next_state", plan.tile_key)["BV"]
    small = inputs.q.shape[-1] <= SCORED_KEYS and x.shape[-1] <= tile and inputs.n_steps == 1
    able = x.dtype in SCORED_TYPES and on_hopper(x)
    return inputs.log_decay is None and small and able


def head_scores(call: Call) -> None:
    """Scores, corrections, scalings and the decays of chunks, into the buffers there are."""
    chunks, heads = call.plan.chunks, call.plan.sizes["HV"]
    if call.inputs.log_decay is not None:
        grid = chunks, blocks(heads, SUM_HEADS), 1
        call.launch(head_sums_kernel, grid, {"BH": SUM_HEADS, "num_warps": 2, "num_stages": 1})
    if call["scores"] is not None or call["scalings"] is not None:
        config = call.once(pair_scores_config)
        call.launch(pair_scores_kernel, (chunks, heads, 1), config, score_tiles)


def pair_scores_config(call: Call) -> dict[str, Any]:
    config = configuration("pair_scores", call.plan.tile_key)
    return {
        **config,
        "PRECISION": inverse_precision(call.inputs.q.dtype),
        "TMA": full_tiles(call.inputs, call.plan, 1),
    }


def score_tiles(c: Mapping[str, Any]) -> Tiles:
    width = c["H"] * c["K"]
    return {"q": (width, [c["BQ"], c["K"]]), "k": (width, [c["BT"], c["K"]])}


def scan_config(call: Call, name: str, split: str) -> dict[str, Any]:
    """The configuration of a scan, over whole sequences or segments."""
    config = configuration(name, call.plan.tile_key)
    config = ends_configuration(config) if split == "ends" else config
    full = full_tiles(call.inputs, call.plan, config["BV"])
    # Where products end in tensor memory, Triton cannot hold a store of the copy engine back.
    stores = full and architecture(call.inputs.q.device) < TENSOR_MEMORY
    own = {"SPLIT": split, "TMA": full, "TMA_STORE": stores, "num_stages": config["STAGES"]}
    return config | own


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


def streams(call: Call) -> dict[str, Any]:
    """The arguments of both scans that have other names before: q and k decayed, scalings."""
    decayed = {"q": call["decayed_q"], "k": call["decayed_k"]} if call.inputs.by_channel else {}
    return {"readings": call["scalings"], **decayed}


def opens(call: Call, split: str) -> bool:
    """Whether all segments start at zero: other processes have what is before and after."""
    return split == "ends" and call["join"] is not None


def scan_through(
    call: Call, split: str, places: int, start: Tensor | None, end: Tensor,
    o: Tensor | None = None, own: Mapping[str, Tensor] | None = None, window: Window = WHOLE,
) -> None:  # fmt: skip
    """Launch `next_state_kernel`: from the states at `start` to those at `end`.

    `places` is the number of sequences or segments; S and E of the chunks go where `own` has room.
    """
    config, own = call.once(scan_config, "next_state", split), own or {}
    _, heads, value_size, key_size = call.inputs.state_shape
    tiles = blocks(value_size, config["BV"])
    if split == "ends" and call.inputs.erase != "none":
        tiles += blocks(key_size, config["BV"])
    given = {
        **config, **window.constants(), **streams(call), "OUTPUT": o is not None,
        "SAVE": "states" in own, "initial_state": start, "final_state": end, "o": o,
        "states": own.get("states"), "errors": own.get("errors"), "OPEN": opens(call, split),
    }  # fmt: skip
    call.launch(next_state_kernel, (tiles * heads * places, 1, 1), given, forward_tiles)


def scan_back(
    call: Call, split: str, places: int, d_end: Tensor | None, d_start: Tensor,
    own: Mapping[str, Tensor] | None = None, d_v: Tensor | None = None, window: Window = WHOLE,
) -> None:  # fmt: skip
    """Launch `next_state_backward_kernel`: from the gradients at `d_end` to those at `d_start`.

    D at the chunks' ends, X and a free erase's dv go where `own` has room, and dv of the others to
    `d_v`, if there is any. Of calls that are in `overlays`, D and X lie where gradients will.
    """
    config, own = call.once(scan_config, "next_state_backward", split), own or {}
    _, heads, value_size, _ = call.inputs.state_shape
    grid = blocks(value_size, config["BV"]) * heads * places, 1, 1
    over = overlays(call)
    room = over and "d_states" not in own
    given = {
        **config, **window.constants(), **streams(call), "d_final": d_end, "d_initial": d_start,
        "d_q": call["d_q"] if room else None, "d_k": call["d_k"] if room else None, "OVER": over,
        "d_states": own.get("d_states"), "d_errors": own.get("d_errors"),
        "d_values": own.get("d_values"), "d_v": d_v, "OPEN": opens(call, split),
    }  # fmt: skip
    call.launch(next_state_backward_kernel, grid, given, backward_tiles)


def leave_ends(call: Call) -> None:
    """What the segments leave, with their transitions."""
    initial = None if call["join"] else call.inputs.initial_state
    scan_through(call, "ends", len(call["ends"]), initial, call["ends"])


def first_states(call: Call) -> Tensor:
    """The states at the segments' starts; `ends` takes the segments' transitions besides."""
    join = call["join"]
    # Where the start is still to come, the ends have gone to meet it.
    if not join or join.start is not None:
        leave_ends(call)
    initial = join.states(call) if join else call.inputs.initial_state
    return segment_starts(call, initial, call["ends"], False)


def leave_ends_back(call: Call) -> Tensor:
    """The gradients by the states at the segments' starts."""
    d_ends = call.empty((len(call["ends"]), *call.inputs.state_shape[1:]))
    scan_back(call, "ends", len(d_ends), None if call["join"] else call["d_final"], d_ends)
    return d_ends


def last_gradients(call: Call) -> Tensor:
    """The gradients by the states at the segments' ends."""
    if join := call["join"]:
        return segment_starts(call, join.gradients(call), join.d_ends, True)
    return segment_starts(call, call["d_final"], leave_ends_back(call), True)


def new_gradients(call: Call) -> None:
    """Room for the gradients, those by beta and log_decay in float32."""
    for name in ("q", "k", "v", "a", "b", "beta", "log_decay"):
        x, low = call[name], name not in ("beta", "log_decay")
        made = None if x is None else call.empty(x.shape, x.dtype if low else torch.float32)
        call.values[f"d_{name}"] = made


def scan_back_has_values(call: Call) -> bool:
    """Whether the scan back writes dv: where nobody else asks for X, or value heads share keys.

    For each value head alone it takes the scan longer than the gradients, which have X anyway, and
    may find it where dv will be.
    """
    shared = call.plan.sizes["HV"] > call.plan.sizes["H"]
    return call.inputs.beta is None or shared or overlays(call)


def fused_forward(call: Call, save: bool) -> Any:
    """What does a whole forward in one kernel, where that pays; None elsewhere."""
    if not on_hopper(call.inputs.q):
        return None
    from deltarule.ops.delta_rule.gluon import stage

    return stage if stage.pays(call.inputs, call.plan, save) else None


def fused_gradients(call: Call, window: Window = WHOLE) -> Any:
    """What takes all gradients of a window in one kernel, where that pays; None elsewhere."""
    if not on_hopper(call.inputs.q):
        return None
    from deltarule.ops.delta_rule.gluon import gradient_stage

    return gradient_stage if gradient_stage.takes(call, window) else None


def add_gradients(call: Call, slots: int, own: Mapping[str, Tensor], window: Window) -> None:
    """Launch `gradients_kernel` and what adds up the decays, for the chunks of a window.

    `own` has D, X and the parts of these `slots` alone, and S and E unless all chunks have them.
    """
    sums, heads, x = own.get("parts"), call.plan.sizes["H"], own.get("d_errors")
    each = 0 if sums is None else sums.stride(0)
    chunks = window.constants() | {"s_slice": each, "parts": sums}
    config = call.once(gradients_config)
    if (fused := fused_gradients(call, window)) is not None:
        fused.add_gradients(call, own, window)
        return
    d_v = None if scan_back_has_values(call) else call["d_v"]
    given = {
        **config, **chunks, "KEPT": "states" not in own, "d_states": own["d_states"],
        "states": own.get("states", call["states"]), "errors": own.get("errors", call["errors"]),
        "d_errors": x, "p_x": x, "d_v": d_v,
    }  # fmt: skip
    grid = (slices(call) + sums_pairs(call.inputs)) * heads * slots, 1, 1
    call.launch(gradients_kernel, grid, given, gradient_tiles)
    if sums is not None:
        given = {
            **chunks, "BD": config["BV"], "SLICES": slices(call),
            "PAIRS": sums_pairs(call.inputs), "num_warps": 1, "num_stages": 1,
        }  # fmt: skip
        call.launch(decay_gradients_kernel, (slots, call.plan.sizes["HV"], 1), given)


def gradients_config(call: Call) -> dict[str, Any]:
    inputs, sizes = call.inputs, call.plan.sizes
    config, low = configuration("gradients", call.plan.tile_key), inputs.q.dtype != torch.float32
    # For fewer rows Triton takes other instructions, whose operands are registers.
    reads = max(sizes["BQ"], sizes["BT"]) if low else sizes["BQ"]
    # Rows of the state that are taken at once: BT at most, to leave a sum of each. With fewer those
    # other instructions would make D S^T, too.
    all_rows = low and inputs.log_decay is not None
    fetched = architecture(inputs.q.device) >= COPY_ENGINE
    values = sizes["BT"] if fetched and all_rows else min(config["BV"], sizes["BT"])
    # In float32 a gradient is not rounded before it goes through the norm, which takes all of it.
    whole = inputs.normalize_qk and not low
    channels = sizes["BK"] if whole else min(config["BC"], sizes["BK"])
    # A tile that is fetched has no rows of the next chunk.
    full = full_tiles(inputs, call.plan, values) and sizes["BQ"] == sizes["BT"]
    full = full and not sums_pairs(inputs)
    return config | {"BQ": reads, "BV": values, "BC": channels, "TMA": full}


def gradient_tiles(c: Mapping[str, Any]) -> Tiles:
    rows, width = [c["BT"], c["BV"]], c["HV"] * c["V"]
    state = c["K"], [c["BV"], c["BC"]]
    return {
        "v": (width, rows), "d_o": (width, rows), "errors": (c["V"], rows),
        "d_errors": (c["V"], rows), "states": state, "d_states": state,
    }  # fmt: skip


def norm_follows(call: Call, window: Window) -> bool:
    """Whether gradients by unit q and k still have to go through the norm: in slices no row is
    whole.
    """
    return call.inputs.normalize_qk and slices(call) > 1 and fused_gradients(call, window) is None


def overlays(call: Call) -> bool:
    """Whether one kernel takes all gradients, decays' too, and finds D and X where they will be."""
    return not call.plan.per_segment and fused_gradients(call) is not None


def slices(call: Call) -> int:
    """Programs of a chunk and key head, each of which takes BC channels."""
    return blocks(call.plan.sizes["K"], call.once(gradients_config)["BC"])


def sums_pairs(inputs: Inputs) -> bool:
    """Whether one more program sums the pairs of rows around a decay: in float32 alone."""
    return inputs.log_decay is not None and inputs.q.dtype == torch.float32


def through_norm(call: Call) -> None:
    """Launch `unit_norm_gradients_kernel`: gradients by unit q and k to those by q and k."""
    options = {"ROWS": NORM_ROWS, "num_warps": 4, "num_stages": 1}
    for name in ("q", "k"):
        rows = call[name].numel() // call.plan.sizes["K"]
        given = {"x": call[name], "d_x": call[f"d_{name}"], "rows": rows}
        call.launch(
            unit_norm_gradients_kernel, (blocks(rows, NORM_ROWS), 1, 1), {**given, **options}
        )
