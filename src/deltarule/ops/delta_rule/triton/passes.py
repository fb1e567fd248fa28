"""The whole recurrence in Triton: forward and backward of one call.

    scores -> scan                                     forward
    (scores -> scan ->) scan back -> gradients         backward

A forward that saves keeps S at the chunks' starts, E, and what the pairs of rows left; without
them the backward computes them again. stages.py and channel_stages.py have every stage's kernels.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import channel_stages, stages
from deltarule.ops.delta_rule.triton.plan import (
    WHOLE,
    Call,
    Layout,
    Plan,
    Shapes,
    Window,
    kernel_key,
    layout,
    make_plan,
    new_plan,
    views,
)
from deltarule.ops.delta_rule.triton.segments import segment_count, transitions_shape
from deltarule.ops.dispatch import ONCE, CallKey, call_key, recordings, remember
from deltarule.ops.runtime import launch
from deltarule.ops.runtime.launch import compiled_together
from deltarule.ops.runtime.replay import Outputs, Recording, Tape, Watch, capturing

# A window keeps at least so much, and its launches have so many programs: fewer cost time, and gain
# little. Those of the scan over whole packed sequences are counted as if all were as long.
LEAST_BYTES = 64 * 2**20
LEAST_PROGRAMS, LEAST_SCANS = 1024, 128

# From inputs, a plan, a choice and further tensors.
Stages = Callable[..., Outputs]


def forward(inputs: Inputs, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final state, and what the backward is saved from computing again."""
    o, final, *kept = replayed(forward_stages, inputs, save)
    return o, final, kept[0] if kept else final.new_empty(0, *final.shape[1:])


def fused_forward(inputs: Inputs, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and final state of the fused kernel; nothing is saved for the backward, ever."""
    o, final = replayed(fused_stage, inputs, False)
    return o, final, final.new_empty(0, *final.shape[1:])


def fused_stage(inputs: Inputs, plan: Plan, save: bool, tape: Tape | None = None) -> Outputs:
    """The fused kernel, wherever it can run."""
    from deltarule.ops.delta_rule.gluon import stage

    return stage.forward(Call(contiguous(inputs), plan, tape))


def backward(
    d_o: Tensor, d_final: Tensor | None, inputs: Inputs, saved: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients by the eight tensors from q to initial_state; None in place of a zero d_final."""
    inputs = contiguous(inputs)
    given = piece(d_o), None if d_final is None else piece(d_final), saved
    return in_order(inputs[:8], replayed(gradient_stages, inputs, saved.numel() == 0, given))


def in_order(tensors: Sequence[Tensor | None], found: Outputs) -> tuple[Tensor | None, ...]:
    """The gradients by the first eight fields of the inputs, None where there is no input."""
    left = iter(found)
    gradients = [None if x is None else next(left) for x in tensors[:8]]
    if (beta := tensors[3]) is not None and (d_beta := gradients[3]) is not None:
        # Outside of what is recorded, which has launches alone.
        gradients[3] = d_beta.to(beta.dtype)
    return tuple(gradients)


def repeated_gradients(
    tensors: Sequence[Tensor | None], numbers: tuple[Any, ...], d_o: Tensor, saved: Tensor
) -> tuple[Tensor | None, ...] | None:
    """Those of the fields `tensors` by o alone, where the launches for them are known."""
    call = call_key((*tensors, d_o, None, saved), gradient_stages, False, *numbers)
    known = None if call is None else recordings.get(call.key)
    if call is None or not isinstance(known, Recording):
        return None
    found = known.repeated(call)
    return None if found is None else in_order(tensors, found)


def recording_of(inputs: Inputs, save: bool = False) -> Recording | None:
    """The launches of a forward, where they were recorded."""
    key = key_of(forward_stages, inputs, save)
    known = None if key is None else recordings.get(key.key)
    return known if isinstance(known, Recording) else None


def key_of(
    stages: Stages, inputs: Inputs, choice: bool, more: tuple[Tensor | None, ...] = ()
) -> CallKey | None:
    """All that the launches of these stages on a GPU depend on; None elsewhere."""
    if not inputs.q.is_cuda:
        return None
    return call_key((*inputs[:9], *more), stages, choice, *inputs[9:])


def replayed(
    stages: Stages, inputs: Inputs, choice: bool, more: tuple[Tensor | None, ...] = ()
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
        which = stages, choice, *[x is None for x in more]
        compile_first(inputs, plan, which, lambda: first(inputs, plan, choice, *more))
    if known is ONCE and key.aligned and not launch.watched() and not capturing():
        return record(stages, inputs, plan, choice, more, key)
    return stages(inputs, plan, choice, *more)


def record(
    stages: Stages, inputs: Inputs, plan: Plan, choice: bool, more: tuple[Tensor | None, ...],
    key: CallKey,
) -> Outputs:  # fmt: skip
    """Run the stages of a call and write down what they launch."""
    # Each argument is a tensor of its own, whatever the caller gave twice.
    named = inputs._asdict().items()
    own: dict[str, Any] = {name: x.detach() for name, x in named if isinstance(x, Tensor)}
    more = tuple(None if x is None else x.detach() for x in more)
    tape = Tape([*own.values(), *(x for x in more if x is not None)])
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
    o, _, *kept = forward_stages(inputs, plan, save)
    if kept:
        # Mostly nobody asks for the final state's gradient.
        backward_stages(torch.empty_like(o), None, contiguous(inputs), plan, kept[0])


def forward_stages(inputs: Inputs, plan: Plan, save: bool, tape: Tape | None = None) -> Outputs:
    """The kernels of the forward, which write nothing but memory of the call."""
    call = Call(contiguous(inputs), plan, tape)
    fused = stages.fused_forward(call, save)
    if fused and not save:
        o, final = fused.forward(call)
        return o, final
    places = call.once(kept_layout, save)
    kept = call.empty((places.elements,))
    call.values |= views(kept, places)
    if fused:
        return *fused.forward(call, save), kept
    scores(call)
    o, final = scan(call, output=True)
    assert o is not None
    return (o, final, kept) if save else (o, final)


def gradient_stages(
    inputs: Inputs, plan: Plan, again: bool, d_o: Tensor, d_final: Tensor | None, saved: Tensor,
    tape: Tape | None = None,
) -> Outputs:  # fmt: skip
    """The gradients by what there is; the kernels compute `again` what was not saved."""
    found = zip(inputs, backward_stages(d_o, d_final, inputs, plan, saved, tape), strict=False)
    return tuple(dx for x, dx in found if x is not None and dx is not None)


def backward_stages(
    d_o: Tensor, d_final: Tensor | None, inputs: Inputs, plan: Plan, saved: Tensor,
    tape: Tape | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The kernels of the backward; every tensor lies in one piece."""
    call, cut = begun_back(d_o, d_final, inputs, plan, saved, tape)
    return gradients(call, cut)


def begun_back(
    d_o: Tensor, d_final: Tensor | None, inputs: Inputs, plan: Plan, saved: Tensor,
    tape: Tape | None = None, join: Any = None,
) -> tuple[Call, "Windows"]:  # fmt: skip
    """A backward up to its scans: what the forward kept, or what is computed again."""
    fast = inputs.by_channel and channel_stages.has_fast_form(inputs)
    if fast and inputs.log_decay is not None:
        inputs = inputs._replace(log_decay=piece(inputs.log_decay))
    call, again = Call(inputs, plan, tape), saved.numel() == 0
    call.values |= {"d_o": d_o, "d_final": d_final, "states": None, "errors": None, "ends": None}
    call.values["join"] = join
    cut = call.once(windows_of, again)
    whole = not again or cut.parts == 1
    places = call.once(kept_layout, whole)
    call.values |= views(call.empty((places.elements,)) if again else saved, places)
    # Scores per channel are kept where they are fast; the others are as fast to compute again.
    if again or (inputs.by_channel and not fast):
        scores(call)
    if again and whole:
        scan(call, output=False)
    return call, cut


def gradients(call: Call, cut: "Windows") -> tuple[Tensor | None, ...]:
    """The rest of a backward: gradients by the eight tensors from q to initial_state."""
    if call.inputs.by_channel:
        channel_stages.backward(call)
    else:
        gradients_in_windows(call, cut)
    return *(call[f"d_{name}"] for name in Inputs._fields[:7]), call["d_initial"]


def scores(call: Call) -> None:
    """What the rows of a chunk are to each other."""
    if call.inputs.by_channel:
        channel_stages.scores(call)
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


def kept_shapes(inputs: Inputs, plan: Plan, save: bool) -> Shapes:
    """What a forward keeps: scores, with q and k decayed where these are kept, S, and E or w."""
    if not inputs.by_channel:
        shapes = stages.score_shapes(inputs, plan)
    else:
        kept = save and channel_stages.has_fast_form(inputs)
        shapes = channel_stages.score_shapes(inputs, plan) if kept else {}
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
    return layout(kept_shapes(call.inputs, call.plan, save))


def saved_shape(inputs: Inputs) -> tuple[int, ...]:
    """The shape of what a forward saves: one flat float32 tensor."""
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
    return x if is_piece(x) else x.clone(memory_format=torch.contiguous_format)


# The backward window after window, so that what it keeps of each chunk exists for a few at a time.
#
#     each window of chunks, from the last:    D at its end -> next_state_backward -> D at its start
#                                              gradients of its chunks
#
# The same numbers come out as without windows: D goes from one to the next in float32, as it stays
# in registers otherwise. What the forward did not keep is computed again, S and E too, from the
# states at the windows' starts. The backward is cut where the states are not kept, which is the
# choice of less memory over less time.
#
# A window has the same chunks of every sequence or, where sequences are split, of every segment. Of
# packed sequences, whose lengths the host does not know, it has so many chunks of the row.


class Windows(NamedTuple):
    """How often the backward is cut, and into what: `chunks` of a stretch, `slots` of all."""

    kind: str
    parts: int
    chunks: int
    slots: int

    def window(self, number: int) -> Window:
        """One of them, as the kernels know it."""
        return WHOLE if self.parts == 1 else Window(self.kind, number, self.chunks)


def windows_of(call: Call, again: bool) -> Windows:
    """As many windows as are worth it, from the sizes alone; `again`: of S and E besides.

    Whoever keeps the states has chosen speed: cutting takes 3 to 10 % of the time on an H200.
    """
    inputs, plan = call.inputs, call.plan
    whole = Windows("none", 1, plan.chunks, plan.chunks)
    if not again or inputs.by_channel or plan.chunks == 0:
        return whole
    size = nbytes(own_shapes(call, plan.chunks, again))
    programs = plan.chunks * plan.sizes["H"] * stages.slices(call)
    kind, longest, stretches = stretches_of(inputs, plan)
    most = min(longest, size // LEAST_BYTES, programs // LEAST_PROGRAMS)
    if kind == "row":
        most = min(most, inputs.sequences * plan.sizes["HV"] // LEAST_SCANS)
    # Beside a window there are the states at the starts of all: least where they are as much.
    most = min(most, math.isqrt(size // (4 * stretches * math.prod(inputs.state_shape[1:]))))
    cut = cut_into(call, max(most, 1))
    # Short packed sequences leave most of their segments' places empty.
    return cut if most > 1 and cut.slots < plan.chunks else whole


def cut_into(call: Call, parts: int) -> Windows:
    """So many windows, or fewer where the last would be empty."""
    kind, longest, stretches = stretches_of(call.inputs, call.plan)
    chunks = -(-longest // parts)
    return Windows(
        kind, -(-longest // chunks), chunks, chunks * (1 if kind == "row" else stretches)
    )


def stretches_of(inputs: Inputs, plan: Plan) -> tuple[str, int, int]:
    """What is cut, the chunks of one of them, and how many there are: sequences, or segments."""
    if plan.per_segment:
        return "stretch", plan.per_segment, segment_count(inputs, plan)
    if inputs.cu_seqlens is not None:
        return "row", plan.chunks, inputs.sequences
    return "stretch", -(-inputs.q.shape[1] // plan.sizes["CT"]), inputs.sequences


def own_shapes(call: Call, slots: int, again: bool) -> Shapes:
    """What the backward keeps of a window's chunks: D, X, parts of dlog_decay (and S and E)."""
    inputs, rows = call.inputs, call.plan.sizes["BT"]
    (_, heads, value_size, key_size), dtype = inputs.state_shape, inputs.q.dtype
    states, errors = (slots, heads, value_size, key_size), (slots, heads, rows, value_size)
    over = stages.overlays(call)
    # D of value heads that share keys is more than dq and dk have room for.
    more = heads > call.plan.sizes["H"] or not over
    shapes: Shapes = {"d_states": (states, dtype)} if more else {}
    if inputs.beta is not None and not over:
        shapes["d_errors"] = errors, dtype
    if inputs.log_decay is not None and not over:
        parts = stages.slices(call) + stages.sums_pairs(inputs), slots, heads, 4, rows
        shapes["parts"] = parts, torch.float32
    if again:
        shapes["states"] = states, dtype
        if inputs.beta is not None:
            shapes["errors"] = errors, dtype
    return shapes


def nbytes(shapes: Shapes) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


def own_layout(call: Call, slots: int, again: bool) -> Layout:
    return layout(own_shapes(call, slots, again))


def window_starts(call: Call, cut: Windows) -> list[Tensor | None]:
    """The states at the windows' starts, one tensor of all stretches for each window."""
    start, split, places = call.inputs.initial_state, "none", call.inputs.sequences
    if call.plan.per_segment:
        start = stages.first_states(call)
        split, places = "starts", len(start)
    starts = [start]
    for number in range(cut.parts - 1):
        end = call.empty((places, *call.inputs.state_shape[1:]))
        stages.scan_through(call, split, places, starts[-1], end, window=cut.window(number))
        starts.append(end)
    return starts


def gradients_in_windows(call: Call, cut: Windows) -> None:
    """Leave the gradients by the inputs and the initial state; decay none or per head.

    The call has S and E of all chunks, or they are computed again.
    """
    again = call["states"] is None
    starts = window_starts(call, cut) if again else []
    d_initial = call.empty(call.inputs.state_shape)
    split, places, d_end, carry = "none", call.inputs.sequences, call["d_final"], d_initial
    if call.plan.per_segment:
        d_end = carry = stages.last_gradients(call)
        split, places = "starts", len(d_end)
    own_places = call.once(own_layout, cut.slots, again)
    own = views(call.empty((own_places.elements,)), own_places)
    stages.new_gradients(call)
    d_v = call["d_v"] if stages.scan_back_has_values(call) else None
    spare = torch.empty_like(carry) if again else None
    for number in reversed(range(cut.parts)):
        window = cut.window(number)
        if spare is not None:
            # What comes out at the window's end, nobody needs.
            stages.scan_through(call, split, places, starts.pop(), spare, own=own, window=window)
        d_start = carry if number else d_initial
        stages.scan_back(call, split, places, d_end, d_start, own, d_v, window)
        stages.add_gradients(call, cut.slots, own, window)
        d_end = d_start
    if stages.norm_follows(call, cut.window(0)):
        stages.through_norm(call)
    call.values |= {"d_initial": d_initial}
