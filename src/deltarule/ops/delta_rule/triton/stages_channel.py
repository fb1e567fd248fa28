"""Decay per key channel and the free erase in Triton: buffers and launches of their kernels."""

import torch
from torch import Tensor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import stages_head
from deltarule.ops.delta_rule.triton.channel_gradients_16bit import even_chunks_kernel
from deltarule.ops.delta_rule.triton.channel_gradients_exact import (
    channel_gradients_kernel,
    decay_sums_kernel,
    pair_gradients_kernel,
)
from deltarule.ops.delta_rule.triton.channel_gradients_fast import anchored_gradients_kernel
from deltarule.ops.delta_rule.triton.channel_scores_exact import (
    channel_scores_kernel,
    steep_scores_kernel,
)
from deltarule.ops.delta_rule.triton.channel_scores_fast import even_scores_kernel
from deltarule.ops.delta_rule.triton.plan import (
    Plan,
    Scores,
    Shapes,
    full_tiles,
    inverse_precision,
    precision,
    scores_among,
    strides,
)
from deltarule.ops.delta_rule.triton.tile_sizes import configuration
from deltarule.ops.delta_rule.triton.tiles import SCALINGS
from deltarule.ops.runtime.launch import Grid, Launch

# Rows that the decays of a chunk take, as channel_decay.py lays them out.
SUMS = 212
# Of `anchored_gradients_kernel`: where it runs.
TESTED = {"K": 128, "V": 128, "N_STEPS": 1}
# How far in one block a column may lie below the block's start, as a power of 2.
BARS = {torch.float32: 12.0, torch.float16: 115.0, torch.bfloat16: 115.0}
# Programs for what is rare: two for each of the multiprocessors of a large GPU.
PROGRAMS = 256


def channel_decays(inputs: Inputs) -> Inputs:
    """The same call with log_decay as [B, T, HV, K]; one of a head is repeated in place."""
    log_decay = inputs.log_decay
    if log_decay is None or log_decay.ndim == 4:
        return inputs
    expanded = log_decay.unsqueeze(-1).expand(*log_decay.shape, inputs.q.shape[-1])
    return inputs._replace(log_decay=expanded)


def decay_strides(log_decay: Tensor | None) -> tuple[int, ...]:
    """Of batch, time, head and channel; zeros for None."""
    return (0, 0, 0, 0) if log_decay is None else log_decay.stride()


def options(inputs: Inputs, plan: Plan, config: dict[str, int]) -> dict[str, object]:
    """The compile-time choices that both kernels take."""
    channels = min(plan.sizes["BK"], config["BC"])
    return {
        **{name: plan.sizes[name] for name in ("H", "HV", "K", "N_STEPS", "CT", "BT")},
        **config, "BC": channels, "ERASE": inputs.erase,
        "HAS_DECAY": inputs.log_decay is not None, "UNIT_NORM": inputs.normalize_qk,
        "PACKED": inputs.cu_seqlens is not None, "BAR": BARS[inputs.q.dtype],
        "PRECISION": precision(inputs.q.dtype), "EXACT": inputs.q.dtype == torch.float32,
    }  # fmt: skip


def has_even_chunks(inputs: Inputs) -> bool:
    """Whether kernels of their own take the chunks they can: bfloat16 has the range for it."""
    return inputs.q.dtype == torch.bfloat16 and inputs.decay == "channel" and inputs.erase != "free"


def has_anchored_chunks(inputs: Inputs, plan: Plan) -> bool:
    """Whether one kernel takes all that decays little: at the size at which it was right on a GPU.

    On an H200 it asked for too much shared memory at 64 channels, and was wrong at 3.
    """
    return has_even_chunks(inputs) and TESTED.items() <= plan.sizes.items()


def chunk_grid(inputs: Inputs, plan: Plan, heads: int, parts: int = 1) -> Grid:
    """What `each_chunk` is for: a program for every chunk and head, or a few for the far ones."""
    if has_anchored_chunks(inputs, plan):
        return min(PROGRAMS, plan.chunks * heads), 1, parts
    return plan.chunks, heads, parts


def even_configuration(inputs: Inputs, plan: Plan) -> dict[str, int]:
    """Tile sizes, warps and stages of `even_chunks_kernel`."""
    config = configuration("even_chunks", plan.call)
    # Sums over value heads take registers, too, and so does a loop over channels.
    loops = inputs.normalize_qk or plan.sizes["HV"] != plan.sizes["H"]
    channels = config["BC"] // 2 if loops else config["BC"]
    return config | {"BC": min(plan.sizes["BK"], channels)}


def score_shapes(inputs: Inputs, plan: Plan) -> Shapes:
    """What the pairs of rows of every chunk leave for the kernels that follow the chunks."""
    sizes, dtype, erase = plan.sizes, inputs.q.dtype, inputs.erase
    rows, reads, channels = sizes["BT"], sizes["BQ"], sizes["K"]
    copy, square = ((rows, channels), dtype), ((rows, rows), dtype)
    reading = (reads, rows), dtype
    shapes: Shapes = {"q": ((reads, channels), dtype), "write": copy, "scores": reading}
    if erase != "none":
        shapes |= {"erase": copy, "corrections": square}
    if erase == "free":
        shapes |= {"k": copy, "value_scores": reading, "from_values": square}
    if erase == "tied":
        shapes["scalings"] = (SCALINGS.value, rows), torch.float32
    if inputs.log_decay is not None:
        shapes["chunk_decay"] = (channels,), torch.float32
    each = plan.chunks, sizes["HV"]
    return {name: ((*each, *shape), dtype) for name, (shape, dtype) in shapes.items()}


def score_buffers(inputs: Inputs, plan: Plan, buffers: dict[str, Tensor]) -> Scores:
    """Where they go: among `buffers`, or into new ones."""
    found = {
        name: buffers[name] if name in buffers else plan.empty(*shape, inputs.q.device)
        for name, shape in plan.once(score_shapes, inputs).items()
    }
    return scores_among(found)


def channel_scores(inputs: Inputs, plan: Plan) -> tuple[Scores, Tensor | None]:
    """Launch `channel_scores_kernel`, twice where the erase is free.

    Takes the tensors of `inputs` in one piece each, but for beta and log_decay; leaves the sums of
    the decays for `channel_gradients`.
    """
    inputs, sizes, out = channel_decays(inputs), plan.sizes, score_buffers(inputs, plan, {})
    free, sums = inputs.erase == "free", None
    if inputs.log_decay is not None:
        shape = plan.chunks, sizes["HV"], SUMS, sizes["K"]
        sums = plan.empty(shape, torch.float32, inputs.q.device)
    for erasing_rows in (False, True) if free else (False,):
        plan.once(scores_launch, inputs, erasing_rows)(
            (plan.chunks, sizes["HV"], 1),
            inputs.q, inputs.k, inputs.a, inputs.b, inputs.beta, inputs.log_decay,
            inputs.cu_seqlens, *out, sums,
            inputs.scale, inputs.q.shape[1], inputs.sequences, *strides(inputs.beta),
            *decay_strides(inputs.log_decay),
        )  # fmt: skip
    return out, sums


def scores_launch(inputs: Inputs, plan: Plan, erasing_rows: bool) -> Launch:
    """`channel_scores_kernel` with its constants."""
    sizes = plan.sizes
    constants = options(inputs, plan, configuration("channel_scores", plan.call))
    own = {
        "BQ": sizes["BQ"], "BK": sizes["BK"], "ERASING_ROWS": erasing_rows,
        **score_precisions(inputs),
    }  # fmt: skip
    return Launch(channel_scores_kernel, constants | own)


def score_precisions(inputs: Inputs) -> dict[str, object]:
    """How the products of scores, and those of their inverse, are taken."""
    dtype = inputs.q.dtype
    # A tf32 number has no more digits than a float16 one: rounding to it would show.
    products = "tf32" if dtype == torch.bfloat16 else "tf32x3"
    return {"PRECISION": products, "MERGE": inverse_precision(dtype)}


def channel_gradients(
    inputs: Inputs,
    plan: Plan,
    scores: Scores,
    sums: Tensor | None,
    d_o: Tensor,
    states: Tensor,
    errors: Tensor | None,
    d_states: Tensor,
    d_errors: Tensor,
    d_values: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Launch the kernels of all chunks, then those of what is left: gradients by q to log_decay.

    Takes what the kernels that follow the chunks saved: S, E, D, X and, of a free erase, dv. The
    decays' sums are overwritten.
    """
    wide, erase, x = channel_decays(inputs), inputs.erase, inputs.q
    sizes, rows = plan.sizes, plan.sizes["BT"]
    count = {"none": 1, "tied": 2, "free": 4}[erase]
    kept = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    pairs = torch.empty(plan.chunks, sizes["HV"], count, rows, rows, dtype=kept, device=x.device)
    d_q, d_k, d_v = (torch.empty_like(y) for y in (x, inputs.k, inputs.v))
    d_a, d_b = (None if y is None else torch.empty_like(y) for y in (inputs.a, inputs.b))
    d_beta, d_decay = (
        None if y is None else torch.empty(y.shape, dtype=torch.float32, device=x.device)
        for y in (inputs.beta, wide.log_decay)
    )
    places = inputs.scale, x.shape[1], inputs.sequences, *strides(inputs.beta)
    even, anchored = has_even_chunks(inputs), has_anchored_chunks(inputs, plan)
    if anchored:
        # Of all chunks; those that decay far are written anew by what follows.
        kernel = plan.once(anchored_launch, inputs)
        kernel(
            (stages_head.slices(kernel) * sizes["H"] * plan.chunks, 1, 1),
            plan.constant(triangle, inputs), x, inputs.k, inputs.v, inputs.beta, inputs.log_decay,
            inputs.cu_seqlens, scores.chunk_decay, states, errors, d_o, d_states, d_errors, x,
            inputs.k, d_q, d_k, d_v, d_beta, d_decay, *places,
        )  # fmt: skip
        if inputs.normalize_qk:
            stages_head.norm_gradients(inputs, plan, d_q, d_k)
    plan.once(pairs_launch, inputs)(
        chunk_grid(inputs, plan, sizes["HV"]),
        inputs.v, inputs.beta, inputs.cu_seqlens, scores.chunk_decay if anchored else None, errors,
        d_o, d_errors, d_values, pairs, d_v, d_beta, plan.chunks, *places,
    )  # fmt: skip
    if even:
        kernel = plan.once(even_launch, inputs)
        parts = 1 if inputs.normalize_qk else -(-sizes["K"] // kernel.constants["BC"])
        kernel(
            chunk_grid(inputs, plan, sizes["H"], parts),
            inputs.q, inputs.k, inputs.v, inputs.beta, inputs.cu_seqlens, states, errors, d_o,
            d_states, d_errors, pairs, sums, scores.chunk_decay, d_q, d_k, d_decay, plan.chunks,
            *places,
        )  # fmt: skip
    # What is steep reads and overwrites the sums, so it comes last.
    plan.once(gradients_launch, inputs, even)(
        chunk_grid(inputs, plan, sizes["H"]),
        inputs.q, inputs.k, inputs.v, inputs.a, inputs.b, inputs.beta, wide.log_decay,
        inputs.cu_seqlens, states, errors, d_o, d_states, d_errors, pairs, sums,
        scores.chunk_decay, d_q, d_k, d_a, d_b, d_decay, plan.chunks, *places,
        *decay_strides(wide.log_decay),
    )  # fmt: skip
    if d_decay is not None and inputs.log_decay is not wide.log_decay:
        d_decay = d_decay.sum(-1)
    return d_q, d_k, d_v, d_beta, d_a, d_b, d_decay


# Constants of `channel_gradients_kernel` that the kernels before it take, too.
SHARED = ("HV", "N_STEPS", "CT", "BT", "ERASE", "PACKED", "PRECISION")


def gradient_options(inputs: Inputs, plan: Plan) -> dict[str, object]:
    """The compile-time choices of the kernels of the backward."""
    config = configuration("channel_gradients", plan.call)
    return {**options(inputs, plan, config), "BK": plan.sizes["BK"], "V": plan.sizes["V"]}


def pairs_launch(inputs: Inputs, plan: Plan) -> Launch:
    """`pair_gradients_kernel` with its constants."""
    constants = gradient_options(inputs, plan)
    shared = {name: constants[name] for name in ("H", "K", *SHARED, "V")}
    return Launch(pair_gradients_kernel, {**shared, **configuration("pair_gradients", plan.call)})


def triangle(inputs: Inputs, plan: Plan) -> Tensor:
    """Ones up to the diagonal, [BT, BT]: a product with them adds up rows."""
    size = plan.sizes["BT"]
    return torch.ones(size, size, dtype=inputs.q.dtype, device=inputs.q.device).tril()


def anchored_launch(inputs: Inputs, plan: Plan) -> Launch:
    """`anchored_gradients_kernel` with its constants."""
    config, sizes = configuration("anchored_gradients", plan.call), plan.sizes
    channels = min(config["BC"], sizes["BK"])
    # A tile that is fetched has no rows of the next chunk, and a row of each token.
    full = full_tiles(inputs, plan, config["BV"]) and sizes["BQ"] == sizes["BT"]
    rows, values = [sizes["BT"], config["BV"]], (sizes["V"], sizes["HV"] * sizes["V"])
    some = [sizes["BT"], channels]
    keys, decays = (sizes["H"] * sizes["K"], some), (sizes["HV"] * sizes["K"], some)
    state = sizes["K"], [config["BV"], channels]
    tiles = {
        "v": (values[1], rows), "d_o": (values[1], rows), "errors": (values[0], rows),
        "d_errors": (values[0], rows), "states": state, "d_states": state, "q": keys, "k": keys,
        "d_q": keys, "d_k": keys, "d_v": (values[1], rows), "log_decay": decays,
        "d_log_decay": decays, "ones": (sizes["BT"], [sizes["BT"], sizes["BT"]]),
    }  # fmt: skip
    own = ("H", "HV", "K", "V", "N_STEPS", "CT", "BT", "BK")
    constants = {
        **{name: sizes[name] for name in own}, **config, "BC": channels,
        "TIED": inputs.erase == "tied", "UNIT_NORM": inputs.normalize_qk,
        "PACKED": inputs.cu_seqlens is not None, "TMA": full,
        "PRECISION": precision(inputs.q.dtype),
    }  # fmt: skip
    return Launch(anchored_gradients_kernel, constants, tiles if full else None)


def even_launch(inputs: Inputs, plan: Plan) -> Launch:
    """`even_chunks_kernel` with its constants."""
    constants = gradient_options(inputs, plan)
    shared = {name: constants[name] for name in ("H", *SHARED, "K", "V", "UNIT_NORM")}
    shared["FAR_ALONE"] = has_anchored_chunks(inputs, plan)
    return Launch(even_chunks_kernel, {**shared, **even_configuration(inputs, plan)})


def gradients_launch(inputs: Inputs, plan: Plan, even: bool) -> Launch:
    """`channel_gradients_kernel` with its constants: of all chunks, or of the steep ones."""
    alone = {"STEEP_ALONE": even, "FAR_ALONE": has_anchored_chunks(inputs, plan)}
    return Launch(channel_gradients_kernel, gradient_options(inputs, plan) | alone)


# Scores of bfloat16 inputs with a decay per key channel: launches for even and steep chunks.
#
# bfloat16 has the range of float32, so that the pairs of rows of a whole chunk may take one
# product.
# What is steep is known on the GPU alone: the kernel for it is launched after, always, and mostly
# finds nothing to do.


# Powers of 2: see channel_scores_fast.py.
SHIFT, RANGE = 64.0, 160.0


def even_scores(inputs: Inputs, plan: Plan, buffers: dict[str, Tensor]) -> Scores:
    """Launch `even_scores_kernel`, and after it the one for what it leaves over."""
    x, sizes, out = inputs.q, plan.sizes, score_buffers(inputs, plan, buffers)
    heads = plan.chunks * sizes["HV"]
    even_rows = plan.empty((plan.chunks, sizes["HV"]), torch.int32, x.device)
    written = (
        out.q, out.erase, out.write, out.scores, out.corrections, out.scalings, out.chunk_decay,
        even_rows,
    )  # fmt: skip
    given = inputs.q, inputs.k, inputs.beta, inputs.log_decay, inputs.cu_seqlens, *written
    plan.once(even_scores_launch, inputs)((heads, 1, 1), *given, *places(inputs))
    programs = min(PROGRAMS, heads)
    sums = plan.empty((programs, SUMS, sizes["K"]), torch.float32, x.device)
    plan.once(steep_scores_launch, inputs)(
        (programs, 1, 1), *given, sums, plan.chunks, *places(inputs)
    )
    return out


def places(inputs: Inputs) -> tuple[float, ...]:
    """The numbers that every kernel here takes last."""
    return (
        inputs.scale, inputs.q.shape[1], inputs.sequences, *strides(inputs.beta),
        *decay_strides(inputs.log_decay),
    )  # fmt: skip


def even_scores_launch(inputs: Inputs, plan: Plan) -> Launch:
    """`even_scores_kernel` with its constants."""
    config = configuration("even_scores", plan.call)
    constants = options(inputs, plan, config)
    own = ("H", "HV", "K", "N_STEPS", "CT", "BT", "ERASE", "UNIT_NORM", "PACKED", *config)
    kept = {name: constants[name] for name in own}
    more = {"BQ": plan.sizes["BQ"], "SHIFT": SHIFT, "RANGE": RANGE}
    return Launch(even_scores_kernel, kept | more | score_precisions(inputs))


def steep_scores_launch(inputs: Inputs, plan: Plan) -> Launch:
    """`steep_scores_kernel` with its constants."""
    constants = dict(scores_launch(inputs, plan, False).constants)
    del constants["ERASING_ROWS"], constants["HAS_DECAY"]
    # Around this kernel's loops more channels at once are too many registers.
    constants["BC"] = min(int(constants["BC"]), 16)
    return Launch(steep_scores_kernel, constants)


def decay_sums(inputs: Inputs, plan: Plan, scores: Scores) -> Tensor:
    """Launch `decay_sums_kernel`: what gradients need besides scores, but for anchored chunks."""
    sizes, x = plan.sizes, inputs.q
    known = scores.chunk_decay if has_anchored_chunks(inputs, plan) else None
    shape = plan.chunks, sizes["HV"], SUMS, sizes["K"]
    sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    # The scores have theirs already, the same but for rounding: forward and backward take that.
    chunk_decay = torch.empty_like(sums[:, :, 0], memory_format=torch.contiguous_format)
    plan.once(sums_launch, inputs)(
        chunk_grid(inputs, plan, sizes["HV"]),
        inputs.log_decay, inputs.cu_seqlens, known, chunk_decay, sums, plan.chunks, x.shape[1],
        inputs.sequences, *decay_strides(inputs.log_decay),
    )  # fmt: skip
    return sums


def sums_launch(inputs: Inputs, plan: Plan) -> Launch:
    """`decay_sums_kernel` with its constants."""
    constants = {
        **{name: plan.sizes[name] for name in ("H", "HV", "K", "N_STEPS", "CT", "BK")},
        "PACKED": inputs.cu_seqlens is not None, "EXACT": inputs.q.dtype == torch.float32,
        "num_warps": 2, "num_stages": 1,
    }  # fmt: skip
    return Launch(decay_sums_kernel, constants)
