"""Launches of the two kernels that follow the chunks, over whole sequences, segments or slabs."""

from typing import NamedTuple

from torch import Tensor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.plan import TENSOR_MEMORY, Plan, Scores, full_tiles, precision
from deltarule.ops.delta_rule.triton.scan import next_state_backward_kernel, next_state_kernel
from deltarule.ops.delta_rule.triton.segments import ends_configuration, segment_starts
from deltarule.ops.delta_rule.triton.tile_sizes import architecture, configuration
from deltarule.ops.runtime.launch import Launch, Tiles


class Slab(NamedTuple):
    """The chunks [number, number + 1) * chunks of every stretch, or (kind "row") of the row."""

    kind: str
    number: int | None
    chunks: int | None

    def constants(self, plan: Plan) -> dict[str, object]:
        """What every kernel over the chunks of a slab takes last."""
        split = "starts" if plan.per_segment else "none"
        return {
            "per_segment": plan.per_segment, "SPLIT": split, "slab": self.number,
            "per_slab": self.chunks, "SLAB": self.kind,
        }  # fmt: skip


# All chunks.
WHOLE = Slab("none", None, None)


def flags(inputs: Inputs) -> dict[str, object]:
    """The compile-time choices of the two kernels that follow the chunks."""
    decays, copies = inputs.log_decay is not None, inputs.by_channel
    # Copies hold a head's decay channel by channel, too.
    return {
        "DECAY": "channel" if decays and copies else inputs.decay, "COPIES": copies,
        "ERASE": inputs.erase, "SCALED": not copies and (decays or inputs.normalize_qk),
        "PACKED": inputs.cu_seqlens is not None, "PRECISION": precision(inputs.q.dtype),
    }  # fmt: skip


def fetched(inputs: Inputs, plan: Plan, block: int, name: str) -> Tiles:
    """The arguments that are matrices in whole tiles."""
    sizes = plan.sizes
    rows, reads = sizes["BT"], sizes["BQ"]
    width, values = sizes["H"] * sizes["K"], sizes["HV"] * sizes["V"]
    square, reading, out = (rows, [rows, rows]), (rows, [reads, rows]), (values, [reads, block])
    ours = {"v": (values, [rows, block]), "o": out}
    own = ours if name == "next_state" else {"d_o": out, "d_v": ours["v"]}
    streams = own | {
        "scores": reading, "value_scores": reading, "corrections": square, "from_values": square,
        "scalings": (rows, [1, rows]), "readings": (rows, [1, reads]),
    }  # fmt: skip
    if inputs.by_channel:
        copy = sizes["K"], [rows, sizes["K"]]
        copies = {"k": copy, "erase": copy, "write": copy}
        return streams | copies | {"q": (sizes["K"], [reads, sizes["K"]])}
    return streams | {"q": (width, [reads, sizes["K"]]), "k": (width, [rows, sizes["K"]])}


def scan_launch(
    inputs: Inputs, plan: Plan, name: str, split: str, output: bool = False, save: bool = False,
    slab: Slab = WHOLE,
) -> Launch:  # fmt: skip
    """One of the two kernels that follow the chunks, by the name of its configuration."""
    config = configuration(name, plan.call)
    config = ends_configuration(config) if split == "ends" else config
    full = full_tiles(inputs, plan, config["BV"])
    constants = {
        **plan.sizes, **config, **flags(inputs), **slab.constants(plan), "TMA": full,
        "SPLIT": split, "num_stages": config["STAGES"],
    }  # fmt: skip
    # Where products end in tensor memory, Triton cannot hold a store of the copy engine back.
    stores = full and architecture(inputs.q.device) < TENSOR_MEMORY
    tiles = fetched(inputs, plan, config["BV"], name) if full else {}
    tiles = {x: tile for x, tile in tiles.items() if stores or x not in ("o", "d_v")}
    constants["TMA_STORE"] = stores
    if name == "next_state":
        choices = {"OUTPUT": output, "SAVE": save}
        return Launch(next_state_kernel, {**constants, **choices}, tiles)
    return Launch(next_state_backward_kernel, constants, tiles)


def streams(scores: Scores) -> tuple[Tensor | None, ...]:
    """Scores, corrections and scalings of the chunks, as both kernels take them."""
    return (
        scores.scores, scores.value_scores, scores.corrections, scores.from_values,
        scores.scalings, scores.scalings, scores.chunk_decay,
    )  # fmt: skip


def scan_through(
    inputs: Inputs, plan: Plan, scores: Scores, split: str, places: int, start: Tensor | None,
    end: Tensor, o: Tensor | None, own: dict[str, Tensor], slab: Slab = WHOLE,
) -> None:  # fmt: skip
    """Launch `next_state_kernel`: from the states at `start` to those at `end`.

    `places` is the number of sequences or segments; S and E of the chunks go where `own` has room.
    """
    choices = split, o is not None, "states" in own, slab
    kernel = plan.once(scan_launch, inputs, "next_state", *choices)
    block, (_, heads, value_size, key_size) = kernel.constants["BV"], inputs.state_shape
    tiles = -(-value_size // block)
    if split == "ends" and inputs.erase != "none":
        tiles += -(-key_size // block)
    kernel(
        (tiles * heads * places, 1, 1), scores.q, scores.k, inputs.v, scores.erase, scores.write,
        inputs.cu_seqlens, *streams(scores), start, o, end, own.get("states"), own.get("errors"),
        inputs.scale, inputs.q.shape[1], inputs.sequences,
    )  # fmt: skip


def scan_back(
    inputs: Inputs, plan: Plan, scores: Scores, d_o: Tensor, split: str, places: int,
    d_end: Tensor, d_start: Tensor, own: dict[str, Tensor], slab: Slab = WHOLE,
    d_v: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch `next_state_backward_kernel`: from the gradients at `d_end` to those at `d_start`.

    D at the chunks' ends, X and a free erase's dv go where `own` has room, and dv of the others to
    `d_v`, if there is any.
    """
    kernel = plan.once(scan_launch, inputs, "next_state_backward", split, False, False, slab)
    _, heads, value_size, _ = inputs.state_shape
    kernel(
        (-(-value_size // kernel.constants["BV"]) * heads * places, 1, 1), scores.q, scores.k,
        scores.erase, scores.write, inputs.cu_seqlens, *streams(scores), d_o, d_end, d_start,
        own.get("d_states"), own.get("d_errors"), own.get("d_values"), d_v, inputs.scale,
        inputs.q.shape[1], inputs.sequences,
    )  # fmt: skip


def first_states(inputs: Inputs, plan: Plan, scores: Scores, ends: Tensor) -> Tensor:
    """The states at the segments' starts; `ends` takes the segments' transitions besides."""
    initial = inputs.initial_state
    scan_through(inputs, plan, scores, "ends", len(ends), initial, ends, None, {})
    return segment_starts(inputs, plan, initial, ends, ends, False)


def last_gradients(
    inputs: Inputs, plan: Plan, scores: Scores, d_o: Tensor, d_final: Tensor, transitions: Tensor
) -> Tensor:
    """The gradients by the states at the segments' ends."""
    ends = transitions.new_empty(len(transitions), *inputs.state_shape[1:])
    scan_back(inputs, plan, scores, d_o, "ends", len(ends), d_final, ends, {})
    return segment_starts(inputs, plan, d_final, ends, transitions, True)
