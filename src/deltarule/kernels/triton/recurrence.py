"""The whole recurrence in Triton: forward and backward of one call.

    pair_scores -> next_state                                            forward
    (pair_scores -> next_state ->) next_state_backward -> gradients      backward

A forward that saves keeps S at the chunks' starts, E, and what the pairs of rows left; without
them the backward computes them again.
"""

import torch
from torch import Tensor

from deltarule.kernels.inputs import Inputs
from deltarule.kernels.triton import channel, channel_16bit, head
from deltarule.kernels.triton.configurations import configuration
from deltarule.kernels.triton.direct import ALIGNED, Launch, Tiles
from deltarule.kernels.triton.launch import (
    Layout,
    Plan,
    Scores,
    Shapes,
    full_tiles,
    layout,
    make_plan,
    new_plan,
    precision,
    views,
)
from deltarule.kernels.triton.next_state import next_state_backward_kernel, next_state_kernel
from deltarule.kernels.triton.segments import (
    ends_configuration,
    segment_starts,
    transitions_shape,
)


def kept_shapes(inputs: Inputs, plan: Plan, save: bool) -> Shapes:
    """What a forward keeps: scores where they are no copies of q and k, S, and E or w."""
    shapes = {} if inputs.by_channel else head.score_shapes(inputs, plan)
    if plan.per_segment:
        shapes["ends"] = transitions_shape(inputs, plan, inputs.erase), torch.float32
    if save:
        states = plan.chunks, *inputs.state_shape[1:]
        shapes["states"] = states, inputs.q.dtype
        if inputs.beta is not None or inputs.a is not None:
            errors = *states[:2], plan.sizes["BT"], inputs.v.shape[3]
            shapes["errors"] = errors, inputs.q.dtype
    return shapes


def kept_layout(inputs: Inputs, plan: Plan, save: bool) -> Layout:
    """Where it lies."""
    return layout(kept_shapes(inputs, plan, save))


def saved_shape(inputs: Inputs) -> tuple[int, ...]:
    """Of what a forward saves: one flat float32 tensor."""
    return (kept_layout(inputs, new_plan(inputs), True).elements,)


def pair_scores(
    inputs: Inputs, plan: Plan, buffers: dict[str, Tensor], backward: bool
) -> tuple[Scores, Tensor | None]:
    """What the rows of a chunk are to each other; decays per channel also leave their sums."""
    if channel.has_even_chunks(inputs):
        sums = channel_16bit.decay_sums(inputs, plan) if backward else None
        return channel_16bit.even_scores(inputs, plan), sums
    if plan.call.copies:
        return channel.channel_scores(inputs, plan)
    return head.head_scores(inputs, plan, buffers), None


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
    own = {"v": (values, [rows, block]), "o": out} if name == "next_state" else {"d_o": out}
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
    inputs: Inputs, plan: Plan, name: str, split: str, output: bool = False, save: bool = False
) -> Launch:
    """One of the two kernels that follow the chunks, by the name of its configuration."""
    config = configuration(name, plan.call)
    config = ends_configuration(config) if split == "ends" else config
    full = full_tiles(inputs, plan, config["BV"])
    constants = {
        **plan.sizes, **config, **flags(inputs), "TMA": full, "SPLIT": split,
        "per_segment": plan.per_segment, "num_stages": config["STAGES"],
    }  # fmt: skip
    tiles = fetched(inputs, plan, config["BV"], name) if full else {}
    if name == "next_state":
        return Launch(next_state_kernel, {**constants, "OUTPUT": output, "SAVE": save}, tiles)
    return Launch(next_state_backward_kernel, constants, tiles)


def streams(scores: Scores) -> tuple[Tensor | None, ...]:
    """Scores, corrections and scalings of the chunks, as both kernels take them."""
    return (
        scores.scores, scores.value_scores, scores.corrections, scores.from_values,
        scores.scalings, scores.scalings, scores.chunk_decay,
    )  # fmt: skip


def next_state(
    inputs: Inputs, plan: Plan, scores: Scores, buffers: dict[str, Tensor], output: bool
) -> tuple[Tensor | None, Tensor]:
    """Launch `next_state_kernel`: o and the final state; S and E go where there is a buffer."""
    x, (sequences, heads, value_size, key_size) = inputs.v, inputs.state_shape
    o = torch.empty(inputs.output_shape, dtype=x.dtype, device=x.device) if output else None
    final = torch.empty(inputs.state_shape, dtype=torch.float32, device=x.device)
    states, errors, initial = buffers.get("states"), buffers.get("errors"), inputs.initial_state

    def launch(split: str, initial: Tensor | None, final: Tensor, places: int) -> None:
        ends = split == "ends"
        choices = split, output and not ends, states is not None and not ends
        kernel = plan.once(scan_launch, inputs, "next_state", *choices)
        block = kernel.constants["BV"]
        tiles = -(-value_size // block)
        if ends and inputs.erase != "none":
            tiles += -(-key_size // block)
        kernel(
            (tiles * heads * places, 1, 1), scores.q, scores.k, x, scores.erase, scores.write,
            inputs.cu_seqlens, *streams(scores), initial, None if ends else o, final,
            None if ends else states, None if ends else errors, inputs.scale, inputs.q.shape[1],
            sequences,
        )  # fmt: skip

    if not plan.per_segment:
        launch("none", initial, final, sequences)
        return o, final
    ends = buffers["ends"]
    launch("ends", initial, ends, len(ends))
    starts = segment_starts(inputs, plan, initial, ends, ends, False)
    launch("starts", starts, final, len(ends))
    return o, final


def next_state_backward(
    inputs: Inputs, plan: Plan, scores: Scores, d_o: Tensor, d_final: Tensor,
    transitions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Launch `next_state_backward_kernel`: dS0, dS at chunks' ends, X, and a free erase's dv."""
    x, (sequences, heads, value_size, _) = inputs.v, inputs.state_shape
    d_initial = torch.empty(inputs.state_shape, dtype=torch.float32, device=x.device)
    d_states = x.new_empty(plan.chunks, *inputs.state_shape[1:])
    d_errors = x.new_empty(plan.chunks, heads, plan.sizes["BT"], value_size)
    d_values = None if inputs.a is None else torch.empty_like(d_errors)

    def launch(split: str, d_final: Tensor, d_initial: Tensor, places: int) -> None:
        ends = split == "ends"
        kernel = plan.once(scan_launch, inputs, "next_state_backward", split)
        kernel(
            (-(-value_size // kernel.constants["BV"]) * heads * places, 1, 1), scores.q, scores.k,
            scores.erase, scores.write, inputs.cu_seqlens, *streams(scores), d_o, d_final,
            d_initial, None if ends else d_states, None if ends else d_errors,
            None if ends else d_values, inputs.scale, inputs.q.shape[1], sequences,
        )  # fmt: skip

    if transitions is None:
        launch("none", d_final, d_initial, sequences)
    else:
        ends = transitions.new_empty(len(transitions), *inputs.state_shape[1:])
        launch("ends", d_final, ends, len(ends))
        starts = segment_starts(inputs, plan, d_final, ends, transitions, True)
        launch("starts", starts, d_initial, len(ends))
    return d_initial, d_states, d_errors, d_values


def contiguous(inputs: Inputs) -> Inputs:
    """Everything but the gates in one piece, and the offsets where the tensors are."""

    q, k, v, _, a, b, _, initial, offsets, *_ = inputs
    pieces = (q, k, v, a, b, initial)
    # Mostly there is nothing to do.
    if offsets is None and all(x is None or is_piece(x) for x in pieces):
        return inputs
    a, b, initial = (None if x is None else piece(x) for x in (a, b, initial))
    return inputs._replace(
        q=piece(q), k=piece(k), v=piece(v), a=a, b=b, initial_state=initial,
        cu_seqlens=None if offsets is None else offsets.to(q.device),
    )  # fmt: skip


def is_piece(x: Tensor) -> bool:
    """Whether a tensor lies in one piece, from an address that the copy engine takes."""
    return x.is_contiguous() and x.data_ptr() % ALIGNED == 0


def piece(x: Tensor) -> Tensor:
    """The tensor in one piece."""
    return x if is_piece(x) else x.clone(memory_format=torch.contiguous_format)


def forward(inputs: Inputs, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final state, and what the backward is saved from computing again."""
    inputs = contiguous(inputs)
    plan = make_plan(inputs)
    layout = plan.once(kept_layout, inputs, save)
    kept = torch.empty(layout.elements, dtype=torch.float32, device=inputs.q.device)
    buffers = views(kept, layout)
    scores, _ = pair_scores(inputs, plan, buffers, False)
    o, final = next_state(inputs, plan, scores, buffers, output=True)
    assert o is not None
    return o, final, kept if save else kept.new_empty(0, *inputs.state_shape[1:])


def backward(
    d_o: Tensor, d_final: Tensor, inputs: Inputs, saved: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients by the eight tensors from q to initial_state."""
    inputs, d_o, d_final = contiguous(inputs), piece(d_o), piece(d_final)
    plan, again = make_plan(inputs), saved.numel() == 0
    layout = plan.once(kept_layout, inputs, True)
    if again:
        saved = torch.empty(layout.elements, dtype=torch.float32, device=inputs.q.device)
    buffers, sums = views(saved, layout), None
    if again or inputs.by_channel:
        scores, sums = pair_scores(inputs, plan, buffers, True)
    else:
        scores = head.kept_scores(inputs, buffers)
    if again:
        next_state(inputs, plan, scores, buffers, output=False)
    states, errors = buffers["states"], buffers.get("errors")
    d_initial, d_states, d_errors, d_values = next_state_backward(
        inputs, plan, scores, d_o, d_final, buffers.get("ends")
    )
    if inputs.by_channel:
        gradients = channel.channel_gradients(
            inputs, plan, scores, sums, d_o, states, errors, d_states, d_errors, d_values
        )
    else:
        gradients = head.head_gradients(inputs, plan, buffers, d_o, d_states, d_errors)
    d_q, d_k, d_v, d_beta, d_a, d_b, d_decay = gradients
    if d_beta is not None and inputs.beta is not None:
        d_beta = d_beta.to(inputs.beta.dtype)
    return d_q, d_k, d_v, d_beta, d_a, d_b, d_decay, d_initial
