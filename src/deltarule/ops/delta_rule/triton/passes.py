"""The whole recurrence in Triton: forward and backward of one call.

    (head_sums ->) pair_scores -> next_state                             forward
    (pair_scores -> next_state ->) next_state_backward -> gradients      backward

A forward that saves keeps S at the chunks' starts, E, and what the pairs of rows left; without
them the backward computes them again.
"""

import torch
from torch import Tensor

from deltarule.ops.delta_rule.gluon import stage
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import stages_channel, stages_head
from deltarule.ops.delta_rule.triton.low_memory import gradients_in_slabs, slabs_of
from deltarule.ops.delta_rule.triton.plan import (
    Layout,
    Plan,
    Scores,
    Shapes,
    layout,
    new_plan,
    scores_among,
    views,
)
from deltarule.ops.delta_rule.triton.recording import found, recorded
from deltarule.ops.delta_rule.triton.segments import transitions_shape
from deltarule.ops.delta_rule.triton.stages_scan import (
    first_states,
    last_gradients,
    scan_back,
    scan_through,
)
from deltarule.ops.runtime.launch import ALIGNED
from deltarule.ops.runtime.replay import Recording


def kept_shapes(inputs: Inputs, plan: Plan, save: bool) -> Shapes:
    """What a forward keeps: scores, with copies of q and k where these are kept, S, and E or w."""
    shapes = {} if inputs.by_channel else stages_head.score_shapes(inputs, plan)
    if save and stages_channel.has_even_chunks(inputs):
        shapes = stages_channel.score_shapes(inputs, plan)
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
    if stages_channel.has_even_chunks(inputs):
        scores = stages_channel.even_scores(inputs, plan, buffers)
        return scores, stages_channel.decay_sums(inputs, plan, scores) if backward else None
    if plan.call.copies:
        return stages_channel.channel_scores(inputs, plan)
    return stages_head.head_scores(inputs, plan, buffers), None


def next_state(
    inputs: Inputs, plan: Plan, scores: Scores, buffers: dict[str, Tensor], output: bool
) -> tuple[Tensor | None, Tensor]:
    """Outputs and the final state of whole sequences; S and E go where there is a buffer."""
    x, sequences, initial = inputs.v, inputs.sequences, inputs.initial_state
    o = plan.empty(inputs.output_shape, x.dtype, x.device) if output else None
    final = plan.empty(inputs.state_shape, torch.float32, x.device)
    if not plan.per_segment:
        scan_through(inputs, plan, scores, "none", sequences, initial, final, o, buffers)
        return o, final
    starts = first_states(inputs, plan, scores, buffers["ends"])
    scan_through(inputs, plan, scores, "starts", len(starts), starts, final, o, buffers)
    return o, final


def next_state_backward(
    inputs: Inputs, plan: Plan, scores: Scores, d_o: Tensor, d_final: Tensor,
    transitions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Of all chunks dS0, dS at their ends, X, and a free erase's dv."""
    x, sequences = inputs.v, inputs.sequences
    d_initial = torch.empty(inputs.state_shape, dtype=torch.float32, device=x.device)
    states = plan.chunks, *inputs.state_shape[1:]
    errors = *states[:2], plan.sizes["BT"], states[2]
    own = {"d_states": x.new_empty(states), "d_errors": x.new_empty(errors)}
    if inputs.a is not None:
        own["d_values"] = x.new_empty(errors)
    if transitions is None:
        scan_back(inputs, plan, scores, d_o, "none", sequences, d_final, d_initial, own)
    else:
        d_ends = last_gradients(inputs, plan, scores, d_o, d_final, transitions)
        scan_back(inputs, plan, scores, d_o, "starts", len(d_ends), d_ends, d_initial, own)
    return d_initial, own["d_states"], own["d_errors"], own.get("d_values")


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
    o, final, *kept = recorded(forward_launches, inputs, save, whole_call)
    return o, final, kept[0] if kept else final.new_empty(0, *final.shape[1:])


def fused_forward(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and final state of the fused kernel; nothing is saved for the backward."""
    o, final = recorded(fused_launches, inputs, False, fused_launches)
    return o, final, final.new_empty(0, *final.shape[1:])


def fused_launches(inputs: Inputs, plan: Plan, save: bool) -> tuple[Tensor, ...]:
    """The fused kernel, wherever it can run."""
    return stage.forward(contiguous(inputs), plan)


def recording_of(inputs: Inputs, save: bool = False) -> Recording | None:
    """The launches of a forward, where they were recorded."""
    return found(forward_launches, inputs, save)


def forward_launches(inputs: Inputs, plan: Plan, save: bool) -> tuple[Tensor, ...]:
    """The kernels of the forward, which write nothing but memory of the plan."""
    inputs, device = contiguous(inputs), inputs.q.device
    if not save and stage.pays(inputs, plan):
        return stage.forward(inputs, plan)
    layout = plan.once(kept_layout, inputs, save)
    kept = plan.empty((layout.elements,), torch.float32, device)
    buffers = views(kept, layout)
    scores, _ = pair_scores(inputs, plan, buffers, False)
    o, final = next_state(inputs, plan, scores, buffers, output=True)
    assert o is not None
    return (o, final, kept) if save else (o, final)


def whole_call(inputs: Inputs, plan: Plan, save: bool) -> None:
    """The kernels of the forward and, where it saves for one, of the backward."""
    o, final, *kept = forward_launches(inputs, plan, save)
    if kept:
        like = torch.empty_like(o), torch.empty_like(final)
        backward_launches(*like, contiguous(inputs), plan, *kept)


def backward(
    d_o: Tensor, d_final: Tensor, inputs: Inputs, saved: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients by the eight tensors from q to initial_state."""
    inputs, d_o, d_final = contiguous(inputs), piece(d_o), piece(d_final)
    given, again = (d_o, d_final, saved), saved.numel() == 0
    found = iter(recorded(gradient_launches, inputs, again, gradient_launches, given))
    gradients = [None if x is None else next(found) for x in inputs[:7]]
    if inputs.beta is not None and (d_beta := gradients[3]) is not None:
        # Outside of what is recorded, which has launches alone.
        gradients[3] = d_beta.to(inputs.beta.dtype)
    return *gradients, next(found)


def gradient_launches(
    inputs: Inputs, plan: Plan, again: bool, d_o: Tensor, d_final: Tensor, saved: Tensor
) -> tuple[Tensor, ...]:
    """Those of the gradients that there are; the kernels run `again` what was not saved."""
    gradients = backward_launches(d_o, d_final, inputs, plan, saved)
    return tuple(x for x in gradients if x is not None)


def backward_launches(
    d_o: Tensor, d_final: Tensor, inputs: Inputs, plan: Plan, saved: Tensor
) -> tuple[Tensor | None, ...]:
    """The kernels of the backward; every tensor lies in one piece."""
    if stages_channel.has_even_chunks(inputs) and inputs.log_decay is not None:
        inputs = inputs._replace(log_decay=piece(inputs.log_decay))
    again = saved.numel() == 0
    cut = plan.once(slabs_of, inputs, again)
    whole = not again or cut.parts == 1
    layout = plan.once(kept_layout, inputs, whole)
    if again:
        saved = torch.empty(layout.elements, dtype=torch.float32, device=inputs.q.device)
    buffers, sums = views(saved, layout), None
    if not again and stages_channel.has_even_chunks(inputs):
        scores = scores_among(buffers)
        sums = stages_channel.decay_sums(inputs, plan, scores)
    elif again or inputs.by_channel:
        scores, sums = pair_scores(inputs, plan, buffers, True)
    else:
        scores = stages_head.kept_scores(inputs, buffers)
    if again and whole:
        next_state(inputs, plan, scores, buffers, output=False)
    if inputs.by_channel:
        return channel_backward(inputs, plan, scores, sums, buffers, d_o, d_final)
    return gradients_in_slabs(inputs, plan, cut, scores, buffers, d_o, d_final)


def channel_backward(
    inputs: Inputs, plan: Plan, scores: Scores, sums: Tensor | None, buffers: dict[str, Tensor],
    d_o: Tensor, d_final: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients by the eight tensors from what `buffers` has of all chunks; decay per channel."""
    d_initial, d_states, d_errors, d_values = next_state_backward(
        inputs, plan, scores, d_o, d_final, buffers.get("ends")
    )
    gradients = stages_channel.channel_gradients(
        inputs, plan, scores, sums, d_o, buffers["states"], buffers.get("errors"), d_states,
        d_errors, d_values,
    )  # fmt: skip
    return *gradients, d_initial
