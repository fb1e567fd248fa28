"""The whole recurrence in Triton: forward and backward of one call.

    scores -> scan                                     forward
    (scores -> scan ->) scan back -> gradients         backward

A forward that saves keeps S at the chunks' starts, E, and what the pairs of rows left; without
them the backward computes them again. stages.py and channel_stages.py have every stage's kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deltarule.ops.delta_rule.gluon import stage
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import channel_stages, stages
from deltarule.ops.delta_rule.triton.low_memory import gradients_in_windows, windows_of
from deltarule.ops.delta_rule.triton.plan import (
    Call,
    Layout,
    Plan,
    Shapes,
    kernel_key,
    layout,
    make_plan,
    new_plan,
    views,
)
from deltarule.ops.delta_rule.triton.segments import transitions_shape
from deltarule.ops.runtime import launch
from deltarule.ops.runtime.calls import ONCE, CallKey, call_key, recordings, remember
from deltarule.ops.runtime.compile import compiled_together
from deltarule.ops.runtime.replay import Outputs, Recording, Tape, Watch, capturing

# From inputs, a plan, a choice and further tensors.
Stages = Callable[..., Outputs]


def forward(inputs: Inputs, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final state, and what the backward is saved from computing again."""
    o, final, *kept = replayed(forward_stages, inputs, save)
    return o, final, kept[0] if kept else final.new_empty(0, *final.shape[1:])


def fused_forward(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and final state of the fused kernel; nothing is saved for the backward."""
    o, final = replayed(fused_stage, inputs, False)
    return o, final, final.new_empty(0, *final.shape[1:])


def fused_stage(inputs: Inputs, plan: Plan, save: bool, tape: Tape | None = None) -> Outputs:
    """The fused kernel, wherever it can run."""
    return stage.forward(Call(contiguous(inputs), plan, tape))


def backward(
    d_o: Tensor, d_final: Tensor, inputs: Inputs, saved: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients by the eight tensors from q to initial_state."""
    inputs, given = contiguous(inputs), (piece(d_o), piece(d_final), saved)
    found = iter(replayed(gradient_stages, inputs, saved.numel() == 0, given))
    gradients = [None if x is None else next(found) for x in inputs[:7]]
    if inputs.beta is not None and (d_beta := gradients[3]) is not None:
        # Outside of what is recorded, which has launches alone.
        gradients[3] = d_beta.to(inputs.beta.dtype)
    return *gradients, next(found)


def recording_of(inputs: Inputs, save: bool = False) -> Recording | None:
    """The launches of a forward, where they were recorded."""
    key = key_of(forward_stages, inputs, save)
    known = None if key is None else recordings.get(key.key)
    return known if isinstance(known, Recording) else None


def key_of(
    stages: Stages, inputs: Inputs, choice: bool, more: tuple[Tensor, ...] = ()
) -> CallKey | None:
    """All that the launches of these stages on a GPU depend on; None elsewhere."""
    if not inputs.q.is_cuda:
        return None
    return call_key((*inputs[:9], *more), stages, choice, *inputs[9:])


def replayed(
    stages: Stages, inputs: Inputs, choice: bool, more: tuple[Tensor, ...] = ()
) -> Outputs:
    """stages(inputs, plan, choice, *more); from their recording where a call like it has one."""
    if (key := key_of(stages, inputs, choice, more)) is None:
        return stages(inputs, make_plan(inputs), choice, *more)
    known = recordings.get(key.key, "new")
    if isinstance(known, Recording) and (outputs := known.repeated(key)) is not None:
        return outputs
    plan = make_plan(inputs)
    if known == "new":
        remember(recordings, key.key, ONCE)
        # A backward may follow a forward that saves: its kernels are compiled with it.
        first = all_stages if stages is forward_stages else stages
        compile_first(inputs, plan, (stages, choice), lambda: first(inputs, plan, choice, *more))
    if known is ONCE and key.aligned and not launch.watched() and not capturing():
        return record(stages, inputs, plan, choice, more, key)
    return stages(inputs, plan, choice, *more)


def record(
    stages: Stages, inputs: Inputs, plan: Plan, choice: bool, more: tuple[Tensor, ...], key: CallKey
) -> Outputs:
    """Run the stages of a call and write down what they launch."""
    # Each argument is a tensor of its own, whatever the caller gave twice.
    named = inputs._asdict().items()
    own: dict[str, Any] = {name: x.detach() for name, x in named if isinstance(x, Tensor)}
    more = tuple(x.detach() for x in more)
    tape = Tape([*own.values(), *more])
    with launch.there(inputs.q.device), Watch(tape):
        outputs = stages(inputs._replace(**own), plan, choice, *more, tape=tape)
    remember(recordings, key.key, tape.recording(outputs))
    return outputs


def compile_first(
    inputs: Inputs, plan: Plan, which: tuple[object, ...], run: Callable[[], object]
) -> None:
    """Compile the kernels of some stages side by side, before the first call of their kind."""
    # The plan is asked first, which costs next to nothing.
    if inputs.q.is_cuda and which not in plan.made:
        plan.made[which] = True
        compiled_together(run, (*which, kernel_key(inputs, plan)))


def all_stages(inputs: Inputs, plan: Plan, save: bool) -> None:
    """The kernels of the forward and, where it saves for one, of the backward."""
    o, final, *kept = forward_stages(inputs, plan, save)
    if kept:
        like = torch.empty_like(o), torch.empty_like(final)
        backward_stages(*like, contiguous(inputs), plan, kept[0])


def forward_stages(inputs: Inputs, plan: Plan, save: bool, tape: Tape | None = None) -> Outputs:
    """The kernels of the forward, which write nothing but memory of the call."""
    call = Call(contiguous(inputs), plan, tape)
    if not save and stage.pays(call.inputs, plan):
        return stage.forward(call)
    places = call.once(kept_layout, save)
    kept = call.empty((places.elements,))
    call.values |= views(kept, places)
    scores(call)
    o, final = scan(call, output=True)
    assert o is not None
    return (o, final, kept) if save else (o, final)


def gradient_stages(
    inputs: Inputs, plan: Plan, again: bool, d_o: Tensor, d_final: Tensor, saved: Tensor,
    tape: Tape | None = None,
) -> Outputs:  # fmt: skip
    """The gradients that there are; the kernels compute `again` what was not saved."""
    gradients = backward_stages(d_o, d_final, inputs, plan, saved, tape)
    return tuple(x for x in gradients if x is not None)


def backward_stages(
    d_o: Tensor, d_final: Tensor, inputs: Inputs, plan: Plan, saved: Tensor,
    tape: Tape | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The kernels of the backward; every tensor lies in one piece."""
    if channel_stages.has_fast_form(inputs) and inputs.log_decay is not None:
        inputs = inputs._replace(log_decay=piece(inputs.log_decay))
    call, again = Call(inputs, plan, tape), saved.numel() == 0
    call.values |= {"d_o": d_o, "d_final": d_final, "states": None, "errors": None, "ends": None}
    cut = call.once(windows_of, again)
    whole = not again or cut.parts == 1
    places = call.once(kept_layout, whole)
    call.values |= views(call.empty((places.elements,)) if again else saved, places)
    # Scores per channel are kept where they are fast; the others are as fast to compute again.
    if again or (inputs.by_channel and not channel_stages.has_fast_form(inputs)):
        scores(call)
    if again and whole:
        scan(call, output=False)
    if channel_stages.has_fast_form(inputs):
        channel_stages.decay_sums(call)
    if inputs.by_channel:
        channel_backward(call)
    else:
        gradients_in_windows(call, cut)
    return *(call[f"d_{name}"] for name in inputs._fields[:7]), call["d_initial"]


def scores(call: Call) -> None:
    """What the rows of a chunk are to each other."""
    if channel_stages.has_fast_form(call.inputs):
        channel_stages.fast_scores(call)
    elif call.inputs.by_channel:
        channel_stages.exact_scores(call)
    else:
        stages.head_scores(call)


def scan(call: Call, output: bool) -> tuple[Tensor | None, Tensor]:
    """Outputs and the final state of whole sequences; S and E go where there is a buffer."""
    inputs, own = call.inputs, {}
    o = call.empty(inputs.output_shape, inputs.v.dtype) if output else None
    final = call.empty(inputs.state_shape)
    if call["states"] is not None:
        own = {name: call[name] for name in ("states", "errors")}
    split, places, start = "none", inputs.sequences, inputs.initial_state
    if call.plan.per_segment:
        start = stages.first_states(call)
        split, places = "starts", len(start)
    stages.scan_through(call, split, places, start, final, o, own)
    return o, final


def channel_backward(call: Call) -> None:
    """The scan back over all chunks and the gradients; decay per channel or a free erase."""
    inputs, dtype = call.inputs, call.inputs.v.dtype
    states = call.plan.chunks, *inputs.state_shape[1:]
    errors = *states[:2], call.plan.sizes["BT"], states[2]
    d_initial = call.empty(inputs.state_shape)
    own = {"d_states": call.empty(states, dtype), "d_errors": call.empty(errors, dtype)}
    if inputs.a is not None:
        own["d_values"] = call.empty(errors, dtype)
    split, places, d_end = "none", inputs.sequences, call["d_final"]
    if call.plan.per_segment:
        d_end = stages.last_gradients(call)
        split, places = "starts", len(d_end)
    stages.scan_back(call, split, places, d_end, d_initial, own)
    call.values |= {"d_values": None, **own, "d_initial": d_initial}
    channel_stages.channel_gradients(call)


def kept_shapes(inputs: Inputs, plan: Plan, save: bool) -> Shapes:
    """What a forward keeps: scores, with q and k decayed where these are kept, S, and E or w."""
    shapes = {} if inputs.by_channel else stages.score_shapes(inputs, plan)
    if save and channel_stages.has_fast_form(inputs):
        shapes = channel_stages.channel_score_shapes(inputs, plan)
    if plan.per_segment:
        shapes["ends"] = transitions_shape(inputs, plan), torch.float32
    if save:
        states = plan.chunks, *inputs.state_shape[1:]
        shapes["states"] = states, inputs.q.dtype
        if inputs.beta is not None or inputs.a is not None:
            errors = *states[:2], plan.sizes["BT"], inputs.v.shape[3]
            shapes["errors"] = errors, inputs.q.dtype
    return shapes


def kept_layout(call: Call, save: bool) -> Layout:
    """Where it lies."""
    return layout(kept_shapes(call.inputs, call.plan, save))


def saved_shape(inputs: Inputs) -> tuple[int, ...]:
    """Of what a forward saves: one flat float32 tensor."""
    return (layout(kept_shapes(inputs, new_plan(inputs), True)).elements,)


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
    return x.is_contiguous() and x.data_ptr() % launch.ALIGNED == 0


def piece(x: Tensor) -> Tensor:
    """The tensor in one piece."""
    return x if is_piece(x) else x.clone(memory_format=torch.contiguous_format)
