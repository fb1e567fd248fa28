"""The whole recurrence in Triton: forward and backward of one call.

    scores -> scan                                     forward
    (scores -> scan ->) scan back -> gradients         backward

A forward that saves keeps S at the chunks' starts, E, and what the pairs of rows left; without
them the backward computes them again, and may do so window after window (windows.py). A stage
is a file: scores.py, scan.py, gradients.py; with a decay per channel channel_stages.py has others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import channel_stages, windows
from deltarule.ops.delta_rule.triton.gradients import (
    add_gradients,
    own_buffers,
    room_in_gradients,
    rows_are_cut,
)
from deltarule.ops.delta_rule.triton.plan import (
    WHOLE,
    Call,
    Layout,
    Plan,
    Shapes,
    blocks,
    kernel_key,
    layout,
    make_plan,
    new_plan,
    on_hopper,
    views,
)
from deltarule.ops.delta_rule.triton.scan import scan_back, scan_through
from deltarule.ops.delta_rule.triton.scores import head_scores, score_shapes
from deltarule.ops.delta_rule.triton.segment_ends import transitions_shape
from deltarule.ops.delta_rule.triton.segments import first_states, last_gradients
from deltarule.ops.delta_rule.triton.tiles import inverse_norm, unit_norm_backward
from deltarule.ops.delta_rule.triton.windows import Windows
from deltarule.ops.dispatch import ONCE, CallKey, call_key, recordings, remember
from deltarule.ops.runtime import launch
from deltarule.ops.runtime.launch import compiled_together
from deltarule.ops.runtime.replay import Outputs, Recording, capturing, record

# Rows of q or k that a program takes.
NORM_ROWS = 32
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


def fused_stage(inputs: Inputs, plan: Plan, save: bool) -> Outputs:
    """The fused kernel, wherever it can run."""
    from deltarule.ops.delta_rule.gluon import stage

    return stage.forward(Call(contiguous(inputs), plan))


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
    """Gradients of the fields `tensors` by recorded launches, or None without a recording."""
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
        return record(lambda x, *y: stages(x, plan, choice, *y), key, inputs, more)
    return stages(inputs, plan, choice, *more)


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
        gradient_stages(contiguous(inputs), plan, False, torch.empty_like(o), None, kept[0])


def forward_stages(inputs: Inputs, plan: Plan, save: bool) -> Outputs:
    """The kernels of the forward, which write nothing but memory of the call."""
    call = Call(contiguous(inputs), plan)
    fused = fused_that_pays(call, save)
    if fused and not save:
        o, final = fused.forward(call)
        return o, final
    kept = keep(call, save)
    if fused:
        return *fused.forward(call, save), kept
    scores(call)
    o, final = scan(call, output=True)
    assert o is not None
    return (o, final, kept) if save else (o, final)


def fused_that_pays(call: Call, save: bool) -> Any:
    """What does a whole forward in one kernel, where that pays; None elsewhere."""
    if not on_hopper(call.inputs.q):
        return None
    from deltarule.ops.delta_rule.gluon import stage

    return stage if stage.pays(call.inputs, call.plan, save) else None


def gradient_stages(inputs: Inputs, plan: Plan, again: bool, *given: Any) -> Outputs:
    """The gradients by what there is; the kernels compute `again` what was not saved."""
    call = call_back(inputs, plan)
    found = zip(inputs, gradients(call, begin_back(call, *given)), strict=False)
    return tuple(dx for x, dx in found if x is not None and dx is not None)


def call_back(inputs: Inputs, plan: Plan) -> Call:
    """The call of a backward, every tensor in one piece."""
    fast = inputs.by_channel and channel_stages.has_fast_form(inputs)
    if fast and inputs.log_decay is not None:
        inputs = inputs._replace(log_decay=piece(inputs.log_decay))
    return Call(inputs, plan)


def begin_back(
    call: Call, d_o: Tensor, d_final: Tensor | None, saved: Tensor, join: Any = None
) -> Windows | None:
    """A backward up to its scans: what the forward kept, or what is computed again."""
    again = saved.numel() == 0
    call.values |= {"d_o": d_o, "d_final": d_final, "states": None, "errors": None, "ends": None}
    call.values["join"] = join
    cut: Windows | None = call.once(windows.windows_of) if again else None
    keep(call, cut is None, None if again else saved)
    # Scores per channel are kept where they are fast; the others are as fast to compute again.
    if again or (call.inputs.by_channel and not channel_stages.has_fast_form(call.inputs)):
        scores(call)
    if again and cut is None:
        scan(call, output=False)
    return cut


def gradients(call: Call, cut: Windows | None) -> tuple[Tensor | None, ...]:
    """The rest of a backward: gradients by the eight tensors from q to initial_state."""
    new_gradients(call)
    if call.inputs.by_channel:
        channel_stages.backward(call)
    elif cut is None:
        head_gradients(call)
    else:
        windows.backward(call, cut)
    inputs, window = call.inputs, WHOLE if cut is None else cut.window(0)
    if inputs.normalize_qk and (inputs.by_channel or rows_are_cut(call, window)):
        through_norm(call)
    return *(call[f"d_{name}"] for name in Inputs._fields[:7]), call["d_initial"]


def head_gradients(call: Call) -> None:
    """The scan back over all chunks, and their gradients; decay none or per head."""
    d_end = last_gradients(call) if call.plan.per_segment else call["d_final"]
    own = own_buffers(call, call.plan.chunks, False)
    scan_back(call, d_end, call["d_initial"], own | room_in_gradients(call))
    add_gradients(call, call.plan.chunks, own)


def new_gradients(call: Call) -> None:
    """Room for the gradients, those by beta and log_decay in float32."""
    for name in ("q", "k", "v", "a", "b", "beta", "log_decay"):
        x, low = call[name], name not in ("beta", "log_decay")
        made = None if x is None else call.empty(x.shape, x.dtype if low else torch.float32)
        call.values[f"d_{name}"] = made
    call.values["d_initial"] = call.empty(call.inputs.state_shape)


def scores(call: Call) -> None:
    """What the rows of a chunk are to each other."""
    if call.inputs.by_channel:
        channel_stages.scores(call)
    else:
        head_scores(call)


def scan(call: Call, output: bool) -> tuple[Tensor | None, Tensor]:
    """Outputs and the final state of whole sequences; S and E go where there is a buffer."""
    inputs = call.inputs
    o = call.empty(inputs.output_shape, inputs.v.dtype) if output else None
    final = call.empty(inputs.state_shape)
    start = first_states(call) if call.plan.per_segment else inputs.initial_state
    scan_through(call, start, final, {"o": o, "states": call["states"], "errors": call["errors"]})
    return o, final


def kept_shapes(inputs: Inputs, plan: Plan, save: bool) -> Shapes:
    """What a forward keeps: scores, with q and k decayed where these are kept, S, and E or w."""
    if not inputs.by_channel:
        shapes = score_shapes(inputs, plan)
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


def keep(call: Call, save: bool, kept: Tensor | None = None) -> Tensor:
    """Have what a forward keeps join the namespace, from where it lies or in new memory."""
    places = call.once(kept_layout, save)
    kept = call.empty((places.elements,)) if kept is None else kept
    call.values |= views(kept, places)
    return kept


def saved_shape(inputs: Inputs) -> tuple[int, ...]:
    """The shape of what a forward saves: one flat float32 tensor."""
    return (layout(kept_shapes(inputs, new_plan(inputs), True)).elements,)


def contiguous(inputs: Inputs) -> Inputs:
    """Everything but the gates in one piece, and the offsets where the tensors are."""
    q, k, v, _, a, b, _, initial, offsets, *_ = inputs
    named = {"q": q, "k": k, "v": v, "a": a, "b": b, "initial_state": initial}
    # Mostly there is nothing to do.
    if offsets is None and all(x is None or is_piece(x) for x in named.values()):
        return inputs
    pieces: dict[str, Any] = {name: piece(x) for name, x in named.items() if x is not None}
    offsets = None if offsets is None else offsets.to(q.device)
    return inputs._replace(cu_seqlens=offsets, **pieces)


def is_piece(x: Tensor) -> bool:
    """Whether a tensor lies in one piece, from an address that the copy engine takes."""
    return x.is_contiguous() and x.data_ptr() % launch.ALIGNED == 0


def piece(x: Tensor) -> Tensor:
    return x if is_piece(x) else x.clone(memory_format=torch.contiguous_format)


@triton.jit(do_not_specialize=["rows"])
def unit_norm_gradients_kernel(x, d_x, rows, S: tl.constexpr):
    """Gradients by unit q or k, rows of K channels, to those by q or k, in place."""
    o_r = tl.program_id(0).to(tl.int64) * S.ROWS + tl.arange(0, S.ROWS)
    o_k = tl.arange(0, S.BK)
    o_x, m_x = o_r[:, None] * S.K + o_k[None, :], (o_r < rows)[:, None] & (o_k < S.K)[None, :]
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_y = tl.load(d_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_y = unit_norm_backward(b_x, inverse_norm(b_x), b_y)
    tl.store(d_x + o_x, b_y.to(d_x.dtype.element_ty), mask=m_x)


def through_norm(call: Call) -> None:
    """Launch `unit_norm_gradients_kernel`, where no kernel before had whole rows."""
    options = {"ROWS": NORM_ROWS, "num_warps": 4, "num_stages": 1}
    for name in ("q", "k"):
        rows = call[name].numel() // call.plan.sizes["K"]
        given = {"x": call[name], "d_x": call[f"d_{name}"], "rows": rows}
        call.launch(
            unit_norm_gradients_kernel, (blocks(rows, NORM_ROWS), 1, 1), {**given, **options}
        )
