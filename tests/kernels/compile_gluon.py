"""The fused forwards and the gradients, and the scans of heads with 256 keys."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from ahead import Launch, main, recording

from deltarule.ops.delta_rule.gluon import (
    gradient_stage,
    segment_scan_stage,
    stage,
    wide_scan_stage,
)
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import tile_sizes
from deltarule.ops.delta_rule.triton.gradients import own_shapes
from deltarule.ops.delta_rule.triton.passes import kept_shapes, new_gradients
from deltarule.ops.delta_rule.triton.plan import Call, Plan, new_plan
from deltarule.ops.delta_rule.triton.scan import LEFT

RULES = {
    "gated": ("tied", "head"), "plain": ("none", "none"),
    "delta": ("tied", "none"), "decay": ("none", "head"),
}  # fmt: skip
# With a decay per channel: of 128 by 128, a forward of one write a token that saves nothing.
CHANNELS = {"kda": ("tied", "channel"), "gla": ("none", "channel")}
# Key heads, of 4 value heads; of those in parts, two share their gates as well.
HEADS = {"alone": 4, "grouped": 2, "parts": 2}
TOKENS = {"whole": 128, "ragged": 100, "packed": 128}


class Form(NamedTuple):
    """A call by its name: "gated 128 unit grouped whole"; "bare" is without unit norm."""

    rule: str
    size: int
    norm: str
    heads: str
    tokens: str


FORMS = [
    Form(*of) for of in product(RULES, (128, 64), ("bare", "unit"), ("alone", "grouped"), TOKENS)
]
FORMS += [
    Form("gated", 128, "bare", "parts", "whole"),
    Form("gated", 64, "unit", "parts", "packed"),
    # Where tiles have more channels than heads.
    Form("gated", 96, "unit", "parts", "whole"), Form("plain", 96, "bare", "alone", "whole"),
    *[Form("gated", 96, norm, "alone", tokens) for norm in ("bare", "unit") for tokens in TOKENS],
]  # fmt: skip
# So many keys have scans of their own, and no whole forward.
WIDE = 256
FORMS += [Form(*of) for of in product(RULES, (WIDE,), ("bare",), ("alone",), TOKENS)]
FORMS += [Form(*of) for of in product(CHANNELS, (128,), ("bare", "unit"), ("alone",), TOKENS)]


def inputs_of(form: Form) -> Inputs:
    """Tensors that nobody fills."""
    erase, decay = (RULES | CHANNELS)[form.rule]
    tokens, size, packed = TOKENS[form.tokens], form.size, form.tokens == "packed"
    q, v = (
        torch.empty(1, tokens, heads, size, dtype=torch.bfloat16)
        for heads in (HEADS[form.heads], 4)
    )
    gate = torch.empty(1, tokens, 2 if form.heads == "parts" else 4)
    offsets = torch.zeros(3, dtype=torch.int32) if packed else None
    state = torch.empty(2 if packed else 1, 4, size, size)
    beta = gate if erase == "tied" else None
    decays = {"none": None, "head": gate, "channel": torch.empty(1, tokens, 4, size)}[decay]
    return Inputs(
        q, q, v, beta, None, None, decays, state, offsets, 1, size**-0.5, form.norm == "unit", False
    )  # fmt: skip


def forward(inputs: Inputs) -> None:
    """Nothing is saved."""
    stage.forward(Call(inputs, new_plan(inputs)))


def twice(inputs: Inputs) -> None:
    """The forward of two writes a token."""
    k, v, beta = (None if x is None else torch.cat([x, x], 1) for x in inputs[1:4])
    forward(inputs._replace(k=k, v=v, beta=beta, n_steps=2))


def save(inputs: Inputs, lends: bool = False) -> None:
    """With what a backward asks for."""
    stage.forward(kept(inputs, lends), True)


def lend(inputs: Inputs) -> None:
    """The same where gradients may lie."""
    save(inputs, True)


def kept(inputs: Inputs, lends: bool = False) -> Call:
    """A call with room for what is saved."""
    call = Call(inputs, new_plan(inputs))
    call.values["lends"] = lends
    shapes = kept_shapes(call, True)
    shapes = stage.lending(call, shapes) if lends else shapes
    call.values |= {name: torch.empty(*of[:1], dtype=of[1]) for name, of in shapes.items()}
    return call


def gradients(inputs: Inputs) -> None:
    """Of all chunks."""
    call = kept(inputs)
    shapes = own_shapes(call, call.plan.chunks, False)
    lent = gradient_stage.lent(call)
    own = {
        name: torch.empty(*of[:1], dtype=of[1]) for name, of in shapes.items() if name not in lent
    }
    new_gradients(call)
    call.values["d_o"] = call["d_v"]
    assert gradient_stage.can(call.inputs)
    gradient_stage.add_gradients(call, own)


def channels(inputs: Inputs) -> None:
    """The gradients of all chunks, with a decay per channel."""
    call = kept(inputs)
    new_gradients(call)
    call.values |= {"d_o": call["d_v"], "d_states": call["states"], "d_errors": call["errors"]}
    assert gradient_stage.can_by_channel(call.inputs)
    gradient_stage.channel_gradients(call)


def backward(inputs: Inputs, lends: bool = False) -> None:
    """The scan back and the gradients as one kernel."""
    call = kept(inputs, lends)
    new_gradients(call)
    call.values["d_o"] = call["d_v"]
    gradient_stage.backward(call, None)


def borrow(inputs: Inputs) -> None:
    """The same of what may lie there."""
    backward(inputs, True)


def through(inputs: Inputs, save: bool = False) -> None:
    """The scan of a forward."""
    call = kept(inputs)
    left = {name: call[name] for name in ("states", "errors")} if save else {}
    state = inputs.initial_state
    wide_scan_stage.scans(
        call, dict.fromkeys(LEFT) | left | {"o": inputs.v, "final_state": state}, False
    )


def leaving(inputs: Inputs) -> None:
    """The same of one that saves."""
    through(inputs, True)


def back(inputs: Inputs) -> None:
    """The scan back."""
    call = kept(inputs)
    new_gradients(call)
    call.values |= {"d_o": call["d_v"], "d_final": None}
    own = {"d_states": call["states"], "d_errors": call["errors"], "d_v": call["d_v"]}
    wide_scan_stage.scans(call, dict.fromkeys(LEFT) | own, True)


def scan(
    goal: str, inputs: Inputs, narrow: bool = False, places: str = "all", makes: bool = False
) -> None:
    """A scan over chunks of segments, or of whole sequences."""
    call = making_pairs(inputs) if makes else kept(inputs)
    assert segment_scan_stage.can(inputs, goal)
    key = call.plan.tile_key._replace(narrow=narrow)
    size, made = 0 if (goal, places) == ("outputs", "all") else 1, call.plan.made
    call.plan = Plan(key, call.plan.chunks, call.plan.sizes, size, made)
    states, values = torch.empty(inputs.state_shape), torch.empty_like(inputs.v)
    call.values["d_o"] = values
    o = values if goal == "outputs" else None
    start = None if (goal, places) == ("ends", "later") else inputs.initial_state
    segment_scan_stage.run(call, goal, start, states, o, places)


def narrow_outputs(inputs: Inputs) -> None:
    """Half of a head's values in a program."""
    scan("outputs", inputs, narrow=True)


def scores(inputs: Inputs) -> None:
    """Of the pairs of rows of all chunks."""
    assert segment_scan_stage.can(inputs, "scores")
    segment_scan_stage.scores(kept(inputs))


def making_pairs(inputs: Inputs) -> Call:
    """Where the scan makes P, for which there is no room."""
    call = kept(inputs)
    call.plan.made["makes_pairs"] = True
    call.values["scores"] = None
    return call


def corrections(inputs: Inputs) -> None:
    """Of the pairs of rows of all chunks, without P."""
    segment_scan_stage.scores(making_pairs(inputs))


def making_outputs(inputs: Inputs) -> None:
    """The same as narrow_outputs, and P."""
    scan("outputs", inputs, narrow=True, makes=True)


def outputs(inputs: Inputs) -> None:
    scan("outputs", inputs)


def ends(inputs: Inputs) -> None:
    scan("ends", inputs)


def ends_back(inputs: Inputs) -> None:
    scan("back", inputs)


def later_ends(inputs: Inputs) -> None:
    """Beside which first segments have outputs, as on a GPU where these may start early."""
    segment_scan_stage.can_follow = lambda device: True
    scan("ends", inputs, narrow=True, places="later")


def halved_ends(inputs: Inputs) -> None:
    """With A as halves."""
    call = kept(inputs)
    call.plan = Plan(call.plan.tile_key, call.plan.chunks, call.plan.sizes, 1, {"alone": True})
    call.values["ends"] = torch.empty(halved_shape(inputs))
    segment_scan_stage.leave_ends(call, inputs.initial_state)


def halved_shape(inputs: Inputs) -> tuple[int, ...]:
    """Of ends of three segments."""
    _, heads, values, keys = inputs.state_shape
    return 3 * inputs.sequences, heads, values + keys, keys


def starts(inputs: Inputs, processors: int = 132) -> None:
    """Those of segments from such ends."""
    call = Call(inputs, new_plan(inputs))
    ends = torch.empty(halved_shape(inputs))
    call.values |= {"ends": ends, "halves": ends.view(torch.bfloat16)}
    segment_scan_stage.multiprocessors = lambda device: processors
    segment_scan_stage.starts(call, inputs.initial_state)


def wide_starts(inputs: Inputs) -> None:
    """Of more programs than multiprocessors."""
    starts(inputs, 1)


def first_outputs(inputs: Inputs) -> None:
    """Those, and P."""
    segment_scan_stage.can_follow = lambda device: True
    scan("outputs", inputs, narrow=True, places="first", makes=True)


SCANS = [ends, outputs, narrow_outputs, ends_back]
PAIRS = [scores, corrections, making_outputs, later_ends, first_outputs]
PAIRS += [halved_ends, starts, wide_starts]


def passes_of(form: Form) -> list[Callable[[Inputs], None]]:
    """What is compiled of a form; how many value heads share a key head, no forward knows."""
    if form.size == WIDE:
        halves = [gradients] if gradient_stage.can(inputs_of(form)) else []
        return [through, leaving, back, *halves]
    if form.rule in CHANNELS:
        return [forward, save, channels]
    if form.heads != "alone":
        return [save, gradients] if form.heads == "parts" else [gradients]
    whole = [backward] if form.size > gradient_stage.WHOLE_SIZE // 2 else []
    if form.size == gradient_stage.WHOLE_SIZE and form.tokens == "whole" and form.rule != "plain":
        whole += [lend, borrow]
        if form.rule == "gated":
            whole += [*SCANS, *([] if form.norm == "unit" else PAIRS)]
    return [forward, twice, save, gradients, *whole]


def last_launch(run: Callable[[Inputs], None], inputs: Inputs) -> list[Launch]:
    with recording() as found:
        run(inputs)
    return found[-1:]


def forms(capability: int) -> Iterator[tuple[str, Callable[[], list[Launch]]]]:
    """The last launch of each pass of each form; on sm_100 not of all."""
    tile_sizes.INTERPRETED = capability
    wide_scan_stage.takes = lambda call: True
    for form in FORMS:
        inputs = inputs_of(form)
        assert (
            wide_scan_stage.can(inputs) if form.size == WIDE else stage.why_not_form(inputs) is None
        )
        for run in passes_of(form):
            on_hopper = (backward, lend, borrow, *PAIRS, *SCANS)
            others = form.rule in CHANNELS or form.size == WIDE or run in on_hopper
            if capability == 90 or not others:
                yield (
                    f"{' '.join(map(str, form))} {run.__name__}",
                    partial(last_launch, run, inputs),
                )


if __name__ == "__main__":
    main(forms=forms)
