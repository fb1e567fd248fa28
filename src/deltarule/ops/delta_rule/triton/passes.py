"""The whole recurrence in Triton: forward and backward of one call.

    scores -> scan                                     forward
    (scores -> scan ->) scan back -> gradients         backward

A forward that saves keeps S at the chunks' starts, E, and what the pairs of rows left; without
them the backward computes them again, and may do so window after window (windows.py). A stage
is a file: scores.py, scan.py, gradients.py; with a decay per channel channel_stages.py has others.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import channel_stages, plan, windows
from deltarule.ops.delta_rule.triton.plan import WHOLE, Call, Layout, Shapes, gradients_of
from deltarule.ops.delta_rule.triton.scan import scan_back, scan_through
from deltarule.ops.delta_rule.triton.scores import head_scores, score_shapes
from deltarule.ops.delta_rule.triton.segments import (
    alone,
    first_states,
    last_gradients,
    segment_scan,
)
from deltarule.ops.delta_rule.triton.tiles import inverse_norm, unit_norm_backward
from deltarule.ops.delta_rule.triton.windows import Windows
from deltarule.ops.runtime.launch import ALIGNED, compiled_together
from deltarule.ops.runtime.replay import Outputs, Recorded


def forward(inputs: Inputs, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final state, and what the backward is saved from computing again."""
    o, final, kept = forward_stages(inputs, save)
    return o, final, final.new_empty(0, *final.shape[1:]) if kept is None else kept


def backward(
    d_o: Tensor, d_final: Tensor | None, inputs: Inputs, saved: Tensor, spent: bool = False
) -> tuple[Tensor | None, ...]:
    """Gradients by the eight tensors from q to initial_state; None in place of a zero d_final."""
    d_final = None if d_final is None else piece(d_final)
    return gradient_stages(contiguous(inputs), piece(d_o), d_final, saved, spent)


def compiled_first(run: Callable[..., object]) -> Callable[..., None]:
    """Compiles the kernels that run(inputs, *more) launches, before the first call of a kind."""

    def compile_first(inputs: Inputs, *more: Any) -> None:
        planned = plan.make_plan(inputs)
        which = run, *[x.numel() > 0 if isinstance(x, Tensor) else x for x in more]
        # A look at the plan first costs next to nothing.
        if inputs.q.is_cuda and which not in planned.made:
            planned.made[which] = True
            kind = *which, plan.kernel_key(inputs, planned)
            compiled_together(lambda: run(inputs, *more), kind)

    return compile_first


def all_kernels(inputs: Inputs, save: bool) -> None:
    kept = forward_stages.run(inputs, save)[2]
    if save:
        d_o = inputs.v.new_empty(inputs.output_shape)
        # The final state rarely has a gradient.
        gradient_stages.run(contiguous(inputs), d_o, None, kept)


@partial(Recorded, first=compiled_first(all_kernels))
def forward_stages(inputs: Inputs, save: bool) -> Outputs:
    call = call_of(contiguous(inputs), save)
    if (fused := fused_stage(inputs)) is not None and fused.pays(call.inputs, call.plan, save):
        kept = keep(call, save) if save else None
        return *fused.forward(call, save), kept
    if not save:
        call = alone(call)
    kept = keep(call, save)
    scores(call)
    return *scan(call, output=True), kept if save else None


def call_of(inputs: Inputs, save: bool) -> Call:
    fused = fused_stage(inputs)
    return fused.call_of(inputs, save) if fused else Call(inputs, plan.make_plan(inputs), inputs)


def fused_stage(inputs: Inputs) -> Any:
    """The module of the forward as one kernel, on the GPUs that it is for; else None."""
    if not plan.on_hopper(inputs.q):
        return None
    from deltarule.ops.delta_rule.gluon import stage

    return stage


def backward_stages(
    inputs: Inputs, d_o: Tensor, d_final: Tensor | None, saved: Tensor, spent: bool = False
) -> Outputs:
    """Gradients by the tensors that were given; what was not saved is computed again."""
    call, again = call_of(inputs := in_pieces(inputs), True), not saved.numel()
    if again and (fused := fused_stage(inputs)) is not None:
        saved = fused.kept_again(call, saved)
        if not saved.numel():
            # Windows have kernels of their own, for value heads as they were given.
            call = Call(inputs, plan.make_plan(inputs))
    call.values["spent"] = spent and not again and call["lends"]
    return gradients(call, begin_back(call, d_o, d_final, saved))


gradient_stages = Recorded(backward_stages, compiled_first(backward_stages))


def in_pieces(inputs: Inputs) -> Inputs:
    """What a backward is given, every tensor in one piece."""
    fast = inputs.by_channel and channel_stages.has_fast_form(inputs)
    if fast and inputs.log_decay is not None:
        return inputs._replace(log_decay=piece(inputs.log_decay))
    return inputs


def begin_back(
    call: Call, d_o: Tensor, d_final: Tensor | None, saved: Tensor, join: Any = None
) -> Windows | None:
    """A backward up to its scans: what the forward kept, or what is computed again."""
    again = saved.numel() == 0
    call.values |= {"d_o": d_o, "d_final": d_final, "states": None, "errors": None, "ends": None}
    call.values |= {"join": join, "again": again}
    cut: Windows | None = call.once(windows.windows_of) if again else None
    keep(call, cut is None, None if again else saved)
    # Scores per channel are kept only if they are fast: others are as fast to compute again.
    if again or (call.inputs.by_channel and not channel_stages.has_fast_form(call.inputs)):
        scores(call)
    if again and cut is None:
        scan(call, output=False)
    return cut


def gradients(call: Call, cut: Windows | None) -> tuple[Tensor | None, ...]:
    new_gradients(call)
    if call.inputs.by_channel:
        channel_stages.backward(call)
    elif cut is None:
        head_gradients(call)
    else:
        windows.backward(call, cut)
    inputs, window = call.inputs, WHOLE if cut is None else cut.window(0)
    if inputs.normalize_qk and (inputs.by_channel or gradients_of(call, window).rows_are_cut(call)):
        for name in ("q", "k"):
            rows = call[name].numel() // call.plan.sizes["K"]
            own = {"x": call[name], "d_x": call[f"d_{name}"], "rows": rows, "ROWS": NORM_ROWS}
            own |= {"num_warps": 4, "num_stages": 1}
            call.launch(unit_norm_gradients_kernel, (plan.blocks(rows, NORM_ROWS), 1, 1), own)
    d_initial = None if inputs.initial_state is None else call["d_initial"]
    return *(call[f"d_{name}"] for name in Inputs._fields[:7]), d_initial


def head_gradients(call: Call) -> None:
    d_end = last_gradients(call) if call.plan.per_segment else call["d_final"]
    if call["whole"]:
        call["whole"](call, d_end)
        return
    stage = gradients_of(call)
    own = call.room(stage.own_shapes, call.plan.chunks, False)
    scan_back(call, own | stage.room_in_gradients(call) | {"d_final": d_end})
    stage.add_gradients(call, own)


def new_gradients(call: Call) -> None:
    """Room for the gradients, in the types of their tensors; that by log_decay in float32."""
    places = {"q": "states", "k": "lower_states", "v": "errors"} if call["spent"] else {}
    # No views: what is done to one of those in place counts as done to all.
    lent = {name: call[x].data for name, x in places.items() if call[x] is not None}
    for name in Inputs._fields[:7]:
        x, exact = call.given.v if name == "v" else call[name], name == "log_decay"
        made = lent.get(name)
        if made is None and x is not None:
            made = call.empty(x.shape, torch.float32 if exact else x.dtype)
        call.values[f"d_{name}"] = made
    call.values["d_initial"] = call.empty(call.given.state_shape)


def scores(call: Call) -> None:
    fused = plan.on_hopper(call.inputs.q) and segment_scan(call, "scores")
    by_head = fused.scores if fused else head_scores
    (channel_stages.scores if call.inputs.by_channel else by_head)(call)


def scan(call: Call, output: bool) -> tuple[Tensor | None, Tensor]:
    """Outputs and the final state of whole sequences; S and E go where there is a buffer."""
    inputs = call.inputs
    o = call.values["first_o"] = call.empty(inputs.output_shape, inputs.v.dtype) if output else None
    final = call.empty(inputs.state_shape)
    start = first_states(call) if call.plan.per_segment else inputs.initial_state
    if output and call["states"] is None and (fused := segment_scan(call, "outputs")):
        fused.run(call, "outputs", start, final, o, fused.places_of(call))
        return o, final
    room = {"o": o, "states": call["states"], "errors": call["errors"]}
    scan_through(call, room | {"initial_state": start, "final_state": final})
    return o, final


def kept_shapes(call: Call, save: bool) -> Shapes:
    """What a forward keeps until its last kernel or, with `save`, for the backward."""
    inputs, planned = call.inputs, call.plan
    if not inputs.by_channel:
        shapes = score_shapes(inputs, planned)
    else:
        kept = save and channel_stages.has_fast_form(inputs)
        shapes = channel_stages.score_shapes(inputs, planned) if kept else {}
    if planned.per_segment:
        _, heads, value_size, key_size = inputs.state_shape
        # Of each segment V rows of S, then A (without an erase: its diagonal).
        rows = value_size + (1 if inputs.erase == "none" else key_size)
        ends = plan.stretches(inputs, planned), heads, rows, key_size
        shapes["ends"] = ends, torch.float32
    if save:
        states = planned.chunks, *inputs.state_shape[1:]
        shapes["states"] = states, inputs.q.dtype
        if inputs.beta is not None or inputs.a is not None:
            errors = *states[:2], planned.sizes["BT"], inputs.v.shape[3]
            shapes["errors"] = errors, inputs.q.dtype
        if inputs.normalize_qk and (fused := fused_stage(inputs)) is not None:
            shapes |= fused.kept_norms(inputs, planned)
    return shapes


def kept_layout(call: Call, save: bool, lends: bool = False) -> Layout:
    shapes = kept_shapes(call, save)
    return Layout.of(fused_stage(call.inputs).lending(call, shapes) if lends else shapes)


def keep(call: Call, save: bool, kept: Tensor | None = None) -> Tensor:
    """Have what a forward keeps join the namespace, from where it lies or in new memory."""
    places = call.once(kept_layout, save, bool(call["lends"]))
    kept = call.empty((places.elements,)) if kept is None else kept
    call.values |= places.views(kept)
    return kept


def saved_shape(inputs: Inputs) -> tuple[int, ...]:
    return (kept_layout(call_of(inputs, True), True).elements,)


def contiguous(inputs: Inputs) -> Inputs:
    """Everything but the gates in one piece, and the offsets where the tensors are."""
    q, k, v, _, a, b, _, initial, offsets, *_ = inputs
    named = {"q": q, "k": k, "v": v, "a": a, "b": b, "initial_state": initial}
    # Usually there is nothing to do.
    if offsets is None and all(x is None or is_piece(x) for x in named.values()):
        return inputs
    pieces: dict[str, Any] = {name: piece(x) for name, x in named.items() if x is not None}
    offsets = None if offsets is None else offsets.to(q.device)
    return inputs._replace(cu_seqlens=offsets, **pieces)


def is_piece(x: Tensor) -> bool:
    """Whether a tensor lies in one piece, from an address that the copy engine takes."""
    return x.is_contiguous() and x.data_ptr() % ALIGNED == 0


def piece(x: Tensor) -> Tensor:
    return x if is_piece(x) else x.clone(memory_format=torch.contiguous_format)


# Rows of q or k that a program takes through their norms, if no kernel before had them whole.
NORM_ROWS = 32


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
