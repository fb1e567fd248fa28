"""The stages of a call with a decay per channel or a free erase.

`scores`, the scans of scan.py, `backward`. The fast kernels go first and flag the chunks that decay
too far for them. Only the GPU knows which these are, so the exact kernels are always launched after
them, and skip the others.
"""

from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.channel_decay import ROWS
from deltarule.ops.delta_rule.triton.channel_flagged import (
    decay_sums_kernel,
    exact_gradients_kernel,
    exact_scores_kernel,
    pair_gradients_kernel,
)
from deltarule.ops.delta_rule.triton.channel_gradients_fast import fast_gradients_kernel
from deltarule.ops.delta_rule.triton.channel_gradients_free import free_gradients_kernel
from deltarule.ops.delta_rule.triton.channel_scores_fast import fast_scores_kernel
from deltarule.ops.delta_rule.triton.channel_scores_free import free_scores_kernel
from deltarule.ops.delta_rule.triton.fetched import fast_tiles, free_score_tiles, free_tiles
from deltarule.ops.delta_rule.triton.plan import (
    Call,
    Plan,
    Shapes,
    blocks,
    full_tiles,
    on_hopper,
)
from deltarule.ops.delta_rule.triton.scan import scan_back
from deltarule.ops.delta_rule.triton.segments import last_gradients
from deltarule.ops.delta_rule.triton.tile_sizes import configuration, power_of_two
from deltarule.ops.delta_rule.triton.tiles import SCALINGS
from deltarule.ops.dispatch import PLAIN
from deltarule.ops.runtime.launch import TAPE, Grid

# Programs for flagged chunks: two for each of the multiprocessors of a large GPU.
PROGRAMS = 256
# Powers of 2: see channel_scores_fast.py.
SHIFT, RANGE = 80.0, 160.0


def has_fast_form(inputs: Inputs) -> bool:
    """Whether the fast kernels run first: their decays need the range of bfloat16."""
    return inputs.q.dtype == torch.bfloat16 and inputs.decay == "channel"


def chunk_grid(call: Call, heads: int) -> Grid:
    """A program for every chunk and head; a few for the flagged chunks, after the fast form."""
    if has_fast_form(call.inputs):
        return min(PROGRAMS, call.plan.chunks * heads), 1, 1
    return call.plan.chunks, heads, 1


def channel_config(call: Call, name: str, most: int | None = None) -> dict[str, Any]:
    config = configuration(name, call.plan.tile_key)
    return config | {"BC": min(call.plan.sizes["BK"], config["BC"], most or config["BC"])}


def score_config(call: Call, name: str, most: int | None = None) -> dict[str, Any]:
    # A tf32 number has no more digits than a float16 one: rounding to it would show.
    precision = "tf32" if call.inputs.q.dtype == torch.bfloat16 else "tf32x3"
    return channel_config(call, name, most) | {"PRECISION": precision}


def score_shapes(inputs: Inputs, plan: Plan) -> Shapes:
    """What the pairs of rows of every chunk leave for the kernels that follow the chunks."""
    sizes, dtype, erase = plan.sizes, inputs.q.dtype, inputs.erase
    rows, reads, channels = sizes["BT"], sizes["BQ"], sizes["K"]
    decayed, square = ((rows, channels), dtype), ((rows, rows), dtype)
    reading = (reads, rows), dtype
    shapes: Shapes = {"decayed_q": ((reads, channels), dtype), "write": decayed, "scores": reading}
    if erase != "none":
        shapes |= {"erase": decayed, "corrections": square}
    if erase == "free":
        shapes |= {"decayed_k": decayed, "value_scores": reading, "from_values": square}
    if erase == "tied":
        shapes["scalings"] = (SCALINGS.value, rows), torch.float32
    if inputs.log_decay is not None:
        shapes["chunk_decay"] = (channels,), torch.float32
    if has_fast_form(inputs):
        shapes["fast_rows"] = (), torch.int32
    each = plan.chunks, sizes["HV"]
    return {name: ((*each, *shape), dtype) for name, (shape, dtype) in shapes.items()}


def new_sums(call: Call, *of: int) -> Tensor:
    return call.empty((*of, ROWS.value, call.plan.sizes["K"]))


def scores(call: Call) -> None:
    """Launch the kernels over pairs of rows, the exact ones twice where the erase is free.

    They leave the sums of decays, if they go alone.
    """
    for name, of in score_shapes(call.inputs, call.plan).items():
        if call[name] is None:
            call.values[name] = call.empty(*of)
    chunks, heads, free = call.plan.chunks, call.plan.sizes["HV"], call.inputs.erase == "free"
    fast, grid = has_fast_form(call.inputs), chunk_grid(call, heads)
    # More channels at once would take too many registers around the loop over flagged chunks.
    config = call.once(score_config, "exact_scores", 16 if fast else None)
    if fast:
        (free_scores if free else fast_scores)(call, (chunks * heads, 1, 1))
        config = config | {"sums": new_sums(call, grid[0])}
    elif call.inputs.log_decay is not None:
        call.values["sums"] = new_sums(call, chunks, heads)
    for erasing_rows in (False, True) if free else (False,):
        call.launch(exact_scores_kernel, grid, {**config, "ERASING_ROWS": erasing_rows})


def fast_scores(call: Call, grid: Grid) -> None:
    own = call.once(score_config, "fast_scores") | {"SHIFT": SHIFT, "RANGE": RANGE}
    call.launch(fast_scores_kernel, grid, own)


def free_scores(call: Call, grid: Grid) -> None:
    from deltarule.ops.delta_rule.triton.passes import piece

    q = call.inputs.q
    ones = constant(q, triangle, call.plan.sizes["BT"], q.dtype, q.device)
    own = call.once(free_score_config) | {"ones": ones, "decays": piece(call["log_decay"])}
    call.launch(free_scores_kernel, grid, own, free_score_tiles)


def free_score_config(call: Call) -> dict[str, Any]:
    config, sizes = score_config(call, "free_scores"), call.plan.sizes
    full = full_tiles(call.inputs, call.plan, 1) and sizes["K"] % config["BC"] == 0
    return config | {"TMA": full, "SHIFT": SHIFT, "RANGE": RANGE}


def backward(call: Call) -> None:
    if has_fast_form(call.inputs):
        # What the gradients of flagged chunks need besides scores. Those have their decays already,
        # the same but for rounding: forward and backward take that.
        chunks, heads, key_size = call.plan.chunks, call.plan.sizes["HV"], call.plan.sizes["K"]
        call.values |= {"sums": new_sums(call, chunks, heads)}
        decay = call.empty((chunks, heads, key_size))
        sums = {"chunk_decay": decay, "num_warps": 2, "num_stages": 1}
        call.launch(decay_sums_kernel, chunk_grid(call, heads), sums)
    inputs, dtype = call.inputs, call.inputs.v.dtype
    states = call.plan.chunks, *inputs.state_shape[1:]
    errors = *states[:2], call.plan.sizes["BT"], states[2]
    own = {"d_states": call.empty(states, dtype), "d_errors": call.empty(errors, dtype)}
    if inputs.a is not None:
        own["d_values"] = call.empty(errors, dtype)
    fast = call.once(fastest_gradients)
    # Triton's gradients leave that by v themselves.
    more = {} if fast is fast_gradients else {"d_v": call["d_v"]}
    d_end = last_gradients(call) if call.plan.per_segment else call["d_final"]
    scan_back(call, own | more | {"d_final": d_end})
    call.values |= {"d_values": None, **own}
    gradients(call, fast)


def fastest_gradients(call: Call) -> Callable[[Call], None]:
    """The fast gradients, as one kernel of roles where that is faster."""
    if on_hopper(call.inputs.q):
        from deltarule.ops.delta_rule.gluon import gradient_stage

        if gradient_stage.takes_channels(call):
            return gradient_stage.channel_gradients
    return fast_gradients


def gradients(call: Call, fast: Callable[[Call], None]) -> None:
    """Launch a fast kernel, then the exact ones for the flagged chunks; or these for all.

    Takes what the kernels that follow the chunks saved: S, E, D, X and, of a free erase, dv.
    """
    inputs, sizes, rows = call.inputs, call.plan.sizes, call.plan.sizes["BT"]
    count = {"none": 1, "tied": 2, "free": 4}[inputs.erase]
    dtype = torch.bfloat16 if inputs.q.dtype == torch.bfloat16 else torch.float32
    call.values |= {"pairs": call.empty((call.plan.chunks, sizes["HV"], count, rows, rows), dtype)}
    config = configuration("pair_gradients", call.plan.tile_key)
    if inputs.erase == "free":
        # The pairs are the same without decays, so the fast kernel takes them, too.
        grid = call.plan.chunks, sizes["HV"], 1
        call.launch(pair_gradients_kernel, grid, {**config, "fast_rows": None})
    if has_fast_form(inputs):
        fast(call)
    if inputs.erase != "free":
        call.launch(pair_gradients_kernel, chunk_grid(call, sizes["HV"]), config)
    config = call.once(channel_config, "exact_gradients")
    call.launch(exact_gradients_kernel, chunk_grid(call, sizes["H"]), config)
    d_decay = call["d_log_decay"]
    if d_decay is not None and inputs.decay == "head":
        call.values |= {"d_log_decay": d_decay.sum(-1)}


def fast_gradients(call: Call) -> None:
    """Launch a fast kernel on all chunks; the exact kernels overwrite flagged ones."""
    free, sizes = call.inputs.erase == "free", call.plan.sizes
    config = call.once(fast_config, "free_gradients" if free else "fast_gradients")
    programs = blocks(sizes["K"], config["BC"]) * sizes["H"] * call.plan.chunks
    q, k = call.inputs[:2]
    ones = constant(q, triangle, call.plan.sizes["BT"], q.dtype, q.device)
    pointers = {"ones": ones, "p_q": q, "p_k": k}
    kernel, tiles = (
        (free_gradients_kernel, free_tiles) if free else (fast_gradients_kernel, fast_tiles)
    )
    call.launch(kernel, (programs, 1, 1), {**config, **pointers}, tiles)


def triangle(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Ones up to the diagonal: a product with them adds up rows."""
    return torch.ones(size, size, dtype=dtype, device=device).tril()


# Tensors that calls only read, by the functions that make them and their arguments.
made_once: dict[Hashable, Tensor] = {}


def constant(q: Tensor, make: Callable[..., Tensor], *of: Hashable) -> Tensor:
    """make(*of) where q lies, the same in every call and kept for good."""

    def made() -> Tensor:
        if q.device.type != "cuda":
            return make(*of)
        # Done for all streams.
        stream, done = torch.cuda.Stream(q.device), torch.cuda.Event()
        with torch.cuda.stream(stream):
            found = make(*of)
        done.record(stream)
        done.synchronize()
        return found

    if (found := made_once.get((make, *of))) is None:
        # Memory that a graph captures is valid in its replays alone, and cannot be kept.
        if type(q) not in PLAIN or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            return make(*of)
        # A new thread is outside of the modes and the graphs that the call may be in.
        with ThreadPoolExecutor(1) as thread:
            found = made_once.setdefault((make, *of), thread.submit(made).result())
    if (tape := TAPE.get()) is not None:
        tape.constants.append(found)
    return found


def fast_config(call: Call, name: str) -> dict[str, Any]:
    """The fast gradients take as many channels as their table says, even if there are fewer.

    On Hopper a product of fewer than 64 channels reads its operands into registers, in a loop in
    which a tile must be an operand and nothing else.
    """
    config, sizes = configuration(name, call.plan.tile_key), call.plan.sizes
    # Without a second round there is no loop, and all of its tiles lie in shared memory together.
    values = min(config["BV"], max(power_of_two(sizes["V"]) // 2, 16))
    # A tile that is fetched has no rows of the next chunk, no channels of the next head, and a row
    # of each token.
    full = full_tiles(call.inputs, call.plan, values) and sizes["BQ"] == sizes["BT"]
    full = full and sizes["K"] % config["BC"] == 0
    return config | {"BQ": sizes["BT"], "BV": values, "TMA": full, "SHIFT": SHIFT}
