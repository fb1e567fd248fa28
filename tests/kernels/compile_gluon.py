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


def through(inputs: Inputs, save: bool = False) -> None:
    """The scan of a forward."""
    call = kept(inputs)
    left = {name: call[name] for name in ("states", "errors")} if save else {}
    state = inputs.initial_state
    wide_scan_stage.scans(
        call, dict.fromkeys(LEFT) | left | {"o": inputs.v, "final_state": state}, False
    )


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
    # As on a GPU where first outputs may start early.
    segment_scan_stage.can_follow = lambda device: places in ("later", "first")
    assert segment_scan_stage.can(inputs, goal)
    key = call.plan.tile_key._replace(narrow=narrow)
    size, made = 0 if (goal, places) == ("outputs", "all") else 1, call.plan.made
    call.plan = Plan(key, call.plan.chunks, call.plan.sizes, size, made)
    states, values = torch.empty(inputs.state_shape), torch.empty_like(inputs.v)
    call.values["d_o"] = values
    o = values if goal == "outputs" else None
    start = None if (goal, places) == ("ends", "later") else inputs.initial_state
    segment_scan_stage.run(call, goal, start, states, o, places)


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


BY_CHANNEL = {"forward": forward, "save": save, "channels": channels}
OF_PARTS = {"save": save, "gradients": gradients}
OF_HEADS = {"forward": forward, "twice": twice, **OF_PARTS}
# Where gradients may lie.
LENT = {"lend": partial(save, lends=True), "borrow": partial(backward, lends=True)}
OF_WIDE = {"through": through, "leaving": partial(through, save=True), "back": back}
SCANS = {
    "ends": partial(scan, "ends"), "outputs": partial(scan, "outputs"),
    # Half of a head's values in a program.
    "narrow_outputs": partial(scan, "outputs", narrow=True), "ends_back": partial(scan, "back"),
}  # fmt: skip
PAIRS = {
    "scores": scores, "corrections": corrections, "halved_ends": halved_ends, "starts": starts,
    "making_outputs": partial(scan, "outputs", narrow=True, makes=True),
    # Beside which first segments have outputs, with P.
    "later_ends": partial(scan, "ends", narrow=True, places="later"),
    "first_outputs": partial(scan, "outputs", narrow=True, places="first", makes=True),
    # Of more programs than multiprocessors.
    "wide_starts": partial(starts, processors=1),
}  # fmt: skip
# Their scores have kernels of their own, and P is always there.
OF_KDA = SCANS | {
    "halved_ends": halved_ends, "later_ends": partial(scan, "ends", narrow=True, places="later"),
    "first_outputs": partial(scan, "outputs", narrow=True, places="first"),
}  # fmt: skip
ON_HOPPER = {"gradients", "backward", *LENT, *SCANS, *PAIRS}


def passes_of(form: Form) -> dict[str, Callable[[Inputs], None]]:
    """What is compiled of a form; how many value heads share a key head, no forward knows."""
    if form.size == WIDE:
        return OF_WIDE | ({"gradients": gradients} if gradient_stage.can(inputs_of(form)) else {})
    if form.rule in CHANNELS:
        scans = form.rule == "kda" and (form.norm, form.tokens) == ("bare", "whole")
        return BY_CHANNEL | (OF_KDA if scans else {})
    if form.heads != "alone":
        return OF_PARTS if form.heads == "parts" else {"gradients": gradients}
    whole = {"backward": backward} if form.size > gradient_stage.WHOLE_SIZE // 2 else {}
    if form.size == gradient_stage.WHOLE_SIZE and form.tokens == "whole" and form.rule != "plain":
        whole |= LENT
        if form.rule == "gated":
            whole |= SCANS | ({} if form.norm == "unit" else PAIRS)
    return OF_HEADS | whole


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
        for name, run in passes_of(form).items():
            others = form.rule in CHANNELS or form.size == WIDE or name in ON_HOPPER
            if capability == 90 or not others:
                yield f"{' '.join(map(str, form))} {name}", partial(last_launch, run, inputs)


if __name__ == "__main__":
    main(forms=forms)
