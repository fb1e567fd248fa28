"""Decay none or per head in Triton: launches of its kernels over all chunks, or those of a slab."""

from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.gradients import decay_gradients_kernel, gradients_kernel
from deltarule.ops.delta_rule.triton.plan import (
    COPY_ENGINE,
    TENSOR_MEMORY,
    Plan,
    Scores,
    Shapes,
    full_tiles,
    inverse_precision,
    precision,
    scores_among,
    strides,
)
from deltarule.ops.delta_rule.triton.scores import head_sums_kernel, pair_scores_kernel
from deltarule.ops.delta_rule.triton.stages_scan import WHOLE, Slab
from deltarule.ops.delta_rule.triton.tile_sizes import architecture, configuration
from deltarule.ops.delta_rule.triton.tiles import SCALINGS
from deltarule.ops.runtime.launch import Launch
from deltarule.ops.runtime.unit_norm import unit_norm_gradients_kernel

# Rows of q or k that a program takes through the norm.
NORM_ROWS = 32
# What scans may take scores of: they round q . k before it is scaled, for which float16 has no
# range. With more key channels a tile of S has fewer values, and each would take them again.
SCORED_TYPES, SCORED_KEYS = (torch.bfloat16,), 128
# Heads whose decays a program adds up.
SUM_HEADS = 16


def score_shapes(inputs: Inputs, plan: Plan) -> Shapes:
    """The buffers of `head_scores`."""
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
    x, tile = inputs.v, configuration("next_state", plan.call)["BV"]
    small = inputs.q.shape[-1] <= SCORED_KEYS and x.shape[-1] <= tile and inputs.n_steps == 1
    able = x.dtype in SCORED_TYPES and architecture(x.device) in range(COPY_ENGINE, TENSOR_MEMORY)
    return inputs.log_decay is None and small and able


def kept_scores(inputs: Inputs, buffers: dict[str, Tensor]) -> Scores:
    """Those among the buffers, with q and k as they were given."""
    return scores_among({**buffers, "q": inputs.q, "k": inputs.k})


def head_scores(inputs: Inputs, plan: Plan, buffers: dict[str, Tensor]) -> Scores:
    """Launch `head_sums_kernel` where there are decays, and `pair_scores_kernel`."""
    x, out, heads = inputs.q, kept_scores(inputs, buffers), plan.sizes["HV"]
    places = x.shape[1], inputs.sequences
    if inputs.log_decay is not None:
        plan.once(sums_launch, inputs)(
            (plan.chunks, -(-heads // SUM_HEADS), 1),
            inputs.log_decay, inputs.cu_seqlens, out.scalings, *places, *strides(inputs.log_decay),
        )  # fmt: skip
    if out.scores is not None or out.scalings is not None:
        plan.once(scores_launch, inputs)(
            (plan.chunks, heads, 1),
            x, inputs.k, inputs.beta, inputs.cu_seqlens, out.scores, out.corrections, out.scalings,
            out.chunk_decay, inputs.scale, *places, *strides(inputs.beta),
        )  # fmt: skip
    return out


def sums_launch(inputs: Inputs, plan: Plan) -> Launch:
    """`head_sums_kernel` with its constants."""
    sizes = {name: plan.sizes[name] for name in ("HV", "N_STEPS", "CT", "BT")}
    own = {"BH": SUM_HEADS, "PACKED": inputs.cu_seqlens is not None}
    constants = {**sizes, **own, "num_warps": 2, "num_stages": 1}
    return Launch(head_sums_kernel, constants)


def scores_launch(inputs: Inputs, plan: Plan) -> Launch:
    """`pair_scores_kernel` with its constants."""
    sizes = {name: size for name, size in plan.sizes.items() if name != "V"}
    config, full = configuration("pair_scores", plan.call), full_tiles(inputs, plan, 1)
    width = sizes["H"] * sizes["K"]
    tiles = {"q": (width, [sizes["BQ"], sizes["K"]]), "k": (width, [sizes["BT"], sizes["K"]])}
    own = {"PRECISION": inverse_precision(inputs.q.dtype), "TMA": full}
    constants = {**sizes, **flags(inputs), **config, **own}
    return Launch(pair_scores_kernel, constants, tiles if full else None)


class Gradients(NamedTuple):
    """By q, k, v, and by beta and log_decay in float32."""

    d_q: Tensor
    d_k: Tensor
    d_v: Tensor
    d_beta: Tensor | None
    d_decay: Tensor | None


def new_gradients(inputs: Inputs) -> Gradients:
    """Room for them."""
    d_q, d_k, d_v = (torch.empty_like(x) for x in (inputs.q, inputs.k, inputs.v))
    d_beta, d_decay = (
        None if x is None else torch.empty(x.shape, dtype=torch.float32, device=x.device)
        for x in (inputs.beta, inputs.log_decay)
    )
    return Gradients(d_q, d_k, d_v, d_beta, d_decay)


def scan_back_has_values(inputs: Inputs, plan: Plan) -> bool:
    """Whether the scan back writes dv: where nobody else asks for X, or value heads share keys.

    For each value head alone it takes the scan longer than the gradients, which have X anyway.
    """
    return inputs.beta is None or plan.sizes["HV"] > plan.sizes["H"]


def add_gradients(
    inputs: Inputs, plan: Plan, slots: int, buffers: dict[str, Tensor], own: dict[str, Tensor],
    d_o: Tensor, found: Gradients, slab: Slab,
) -> None:  # fmt: skip
    """Launch `gradients_kernel` and what adds up the decays, for the chunks of a slab.

    `own` has D, X and the parts of these `slots` alone, and S and E unless `buffers` has them.
    """
    x, sizes, sums, kept = inputs.q, plan.sizes, own.get("parts"), {**buffers, **own}
    kernel = plan.once(gradients_launch, inputs, slab, "states" not in own)
    parts = slices(kernel) + float32_decays(inputs)
    places = x.shape[1], inputs.sequences
    each = 0 if sums is None else sums.stride(0)
    d_errors = kept.get("d_errors")
    d_v = None if scan_back_has_values(inputs, plan) else found.d_v
    kernel(
        (parts * sizes["H"] * slots, 1, 1),
        x, inputs.k, inputs.v, inputs.cu_seqlens, buffers.get("scalings"),
        buffers.get("chunk_decay"), kept["states"], kept.get("errors"), d_o, kept["d_states"],
        d_errors, d_errors, found.d_q, found.d_k, d_v, found.d_beta, sums, inputs.scale, *places,
        each,
    )  # fmt: skip
    if inputs.log_decay is not None:
        plan.once(decay_launch, inputs, slab)(
            (slots, sizes["HV"], 1),
            sums, inputs.log_decay, inputs.cu_seqlens, found.d_decay, *places,
            *strides(inputs.log_decay), each,
        )  # fmt: skip


def through_norm(inputs: Inputs, plan: Plan, found: Gradients) -> None:
    """Launch `unit_norm_gradients_kernel` where a program had some of the channels."""
    if inputs.normalize_qk and slices(plan.once(gradients_launch, inputs)) > 1:
        norm_gradients(inputs, plan, found.d_q, found.d_k)


def norm_gradients(inputs: Inputs, plan: Plan, d_q: Tensor, d_k: Tensor) -> None:
    """Launch `unit_norm_gradients_kernel`: gradients by unit q and k to those by q and k."""
    for y, d_y in ((inputs.q, d_q), (inputs.k, d_k)):
        rows = y.numel() // plan.sizes["K"]
        plan.once(norm_launch, inputs)((-(-rows // NORM_ROWS), 1, 1), y, d_y, rows)


def norm_launch(inputs: Inputs, plan: Plan) -> Launch:
    """`unit_norm_gradients_kernel` with its constants."""
    sizes = {"K": plan.sizes["K"], "BK": plan.sizes["BK"], "ROWS": NORM_ROWS}
    return Launch(unit_norm_gradients_kernel, {**sizes, "num_warps": 4, "num_stages": 1})


def float32_decays(inputs: Inputs) -> bool:
    """Whether one more program sums the pairs of rows around a decay: in float32 alone."""
    return inputs.log_decay is not None and inputs.q.dtype == torch.float32


def gradients_launch(inputs: Inputs, plan: Plan, slab: Slab = WHOLE, kept: bool = True) -> Launch:
    """`gradients_kernel` with its constants; S and E are `kept` of all chunks, or of the slab."""
    sizes = dict(plan.sizes)
    if inputs.q.dtype != torch.float32:
        # Products of fewer rows are made of other instructions, whose operands are registers.
        sizes["BQ"] = max(sizes["BQ"], sizes["BT"])
    config = configuration("gradients", plan.call)
    config = config | {"BV": value_rows(inputs, plan, config["BV"])}
    # In float32 a gradient is not rounded before it goes through the norm, which takes all of it.
    whole = inputs.normalize_qk and inputs.q.dtype == torch.float32
    channels = sizes["BK"] if whole else min(config["BC"], sizes["BK"])
    # A tile that is fetched has no rows of the next chunk.
    full = full_tiles(inputs, plan, config["BV"]) and plan.sizes["BQ"] == sizes["BT"]
    full = full and not float32_decays(inputs)
    rows, values = [sizes["BT"], config["BV"]], (sizes["V"], sizes["HV"] * sizes["V"])
    state = sizes["K"], [config["BV"], channels]
    tiles = {
        "v": (values[1], rows), "d_o": (values[1], rows), "errors": (values[0], rows),
        "d_errors": (values[0], rows), "states": state, "d_states": state,
    }  # fmt: skip
    constants = {
        **sizes, **flags(inputs), **config, **slab.constants(plan), "BC": channels, "TMA": full,
        "KEPT": kept,
    }  # fmt: skip
    return Launch(gradients_kernel, constants, tiles if full else None)


def value_rows(inputs: Inputs, plan: Plan, block: int) -> int:
    """Rows of the state that the gradients take at once: BT at most, to leave a sum of each."""
    rows = plan.sizes["BT"]
    fetched = architecture(inputs.q.device) >= COPY_ENGINE and inputs.q.dtype != torch.float32
    # Of fewer rows D S^T, too, would be made of the other instructions.
    return rows if fetched and inputs.log_decay is not None else min(block, rows)


def slices(kernel: Launch) -> int:
    """Programs of a chunk and key head, each of which takes BC channels."""
    return -(-int(kernel.constants["K"]) // int(kernel.constants["BC"]))


def decay_launch(inputs: Inputs, plan: Plan, slab: Slab = WHOLE) -> Launch:
    """`decay_gradients_kernel` with its constants."""
    gradients = plan.once(gradients_launch, inputs)
    constants = {
        **{name: plan.sizes[name] for name in ("HV", "N_STEPS", "CT", "BT")},
        "BD": gradients.constants["BV"],
        "SLICES": slices(gradients), "PAIRS": float32_decays(inputs),
        "PACKED": inputs.cu_seqlens is not None, **slab.constants(plan), "num_warps": 1,
        "num_stages": 1,
    }  # fmt: skip
    return Launch(decay_gradients_kernel, constants)


def flags(inputs: Inputs) -> dict[str, object]:
    """The compile-time choices of the kernels of scores and of gradients."""
    return {
        "HAS_DECAY": inputs.log_decay is not None, "TIED": inputs.beta is not None,
        "UNIT_NORM": inputs.normalize_qk, "PACKED": inputs.cu_seqlens is not None,
        "PRECISION": precision(inputs.q.dtype),
    }  # fmt: skip
