"""Representative calls of the delta rule, forward and backward, and of its steps."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from ahead import TARGETS, Calls, Launch, main, recording
from torch import Tensor

from deltarule.ops.delta_rule.gate_logits import NO_MAPS, GateMaps, Step
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import passes, spanning, tile_sizes, windows
from deltarule.ops.delta_rule.triton import plan as segment_length
from deltarule.ops.delta_rule.triton.step import recurrent_step
from deltarule.ops.serving.pool_triton import move

# The sizes decide, unless a call says in how many windows its backward is cut.
WINDOWS_OF = windows.windows_of
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Call:
    """One call of the operators, forward and backward, or of a step."""

    erase: str = "tied"
    decay: str = "head"
    n_steps: int = 1
    dtype: str = "bfloat16"
    key_size: int = 128
    value_size: int = 128
    tokens: int = 256
    # Of q and k; there are four of v.
    heads: int = 2
    step: bool = False
    # Of q and k; a free erase has no keys to norm.
    normalize_qk: bool = True
    # In how many windows the backward goes through the sequence; None leaves it to the size.
    windows: int | None = None
    # Whether other processes have the rest of the row.
    context: bool = False
    # Of the GPU: few heads and rows are cut into narrow tiles for so many.
    processors: int = 1


# What every change is compiled for, and what `-m slow` adds.
STEPS = [Call(step=True), Call("free", "channel", step=True)]
LOGITS = [
    *(Call("tied", decay, step=True) for decay in ("head", "channel")),
    Call("tied", "channel", n_steps=2, step=True), Call("free", "channel", step=True),
]  # fmt: skip
SHORT = dict.fromkeys(TARGETS, STEPS) | {
    90: [
        *STEPS, Call(), Call(heads=4), Call(value_size=32), Call(processors=132),
        Call(decay="none"),
    ],
    100: [*STEPS, Call(), Call(decay="none")],
}  # fmt: skip
RULES = (("tied", "head"), ("tied", "channel"), ("free", "channel"), ("none", "head"))
LONG = [
    *(Call(erase, decay) for erase, decay in RULES),
    *(Call("tied", decay, dtype="float32") for decay in ("head", "channel")),
    *(Call(dtype="float32", key_size=size, value_size=size, tokens=250) for size in (32, 64)),
    Call("none", "none", dtype="float32", key_size=64, value_size=64),
    *(Call(erase, decay, key_size=256, value_size=512, tokens=250) for erase, decay in RULES[:3]),
    Call(dtype="float32", key_size=256, value_size=512),
    Call("free", "channel", dtype="float32", key_size=256, value_size=256),
    Call(n_steps=2), Call(n_steps=3), Call(key_size=64, value_size=64, dtype="float16"),
    Call(step=True), Call("free", "channel", step=True),
    Call("none", "channel", n_steps=2), Call("tied", "channel", value_size=256), Call(windows=2),
    Call("free", "channel", key_size=1, value_size=1),
    Call("tied", "channel", key_size=1, value_size=1), Call("free", "channel", key_size=3),
    Call(processors=132), Call("none", "head", processors=132), Call(value_size=32),
    Call(heads=4), Call(heads=4, value_size=32), Call("none", "head", heads=4),
    Call(decay="none"), Call(decay="none", normalize_qk=False), Call(decay="none", n_steps=2),
    Call("none", "none"), Call(decay="none", value_size=256),
    *(Call(erase, decay, heads=4, context=True) for erase, decay in RULES[1:]),
]  # fmt: skip


def inputs_of(call: Call) -> Inputs:
    """Tensors that nobody fills."""
    dtype, batch, heads, value_heads = DTYPES[call.dtype], 1, call.heads, 4
    tokens = 1 if call.step else call.tokens
    rows, free = tokens * call.n_steps, call.erase == "free"
    size = batch, tokens, value_heads

    def of(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=like)

    decays = {"none": (), "head": size, "channel": (*size, call.key_size)}[call.decay]
    return Inputs(
        of(batch, tokens, heads, call.key_size), of(batch, rows, heads, call.key_size),
        of(batch, rows, value_heads, call.value_size),
        of(batch, rows, value_heads, like=torch.float32) if call.erase == "tied" else None,
        of(*size, call.key_size) if free else None, of(*size, call.key_size) if free else None,
        of(*decays, like=torch.float32) if decays else None,
        of(batch, value_heads, call.value_size, call.key_size, like=torch.float32),
        None, call.n_steps, call.key_size**-0.5, call.normalize_qk and not free, False,
    )  # fmt: skip


def launches(call: Call, capability: int) -> list[Launch]:
    """Those of a call's forward, its backward, and both with states recomputed."""
    tile_sizes.INTERPRETED = capability
    tile_sizes.configuration.cache_clear()
    segment_length.multiprocessors = lambda device: call.processors
    inputs, parts = inputs_of(call), call.windows
    windows.windows_of = WINDOWS_OF
    if parts is not None:
        windows.windows_of = lambda call: windows.cut_into(call, parts)
    with recording() as found:
        if call.step:
            recurrent_step(Step(inputs, NO_MAPS, inputs.initial_state))
        elif call.context:
            spanning.all_kernels(inputs, True)
        else:
            for save in (False, True):
                o, final, saved = passes.forward(inputs, save)
                passes.backward(torch.empty_like(o), torch.empty_like(final), inputs, saved)
    return found


def step_launches(call: Call) -> list[Launch]:
    """With logits and states in two dtypes each, and on a pool."""
    inputs = inputs_of(call)
    pool, slots = inputs.initial_state.half(), torch.empty(1, 4, dtype=torch.int32)
    sizes = inputs.log_decay.shape[2:]
    beta_max = None if inputs.beta is None else 1.0
    maps = GateMaps(torch.empty(sizes[0]), torch.empty(sizes), beta_max)
    packed = inputs._replace(cu_seqlens=torch.empty(2, dtype=torch.int32))
    with recording() as found:
        for logits, state in ((inputs.q.dtype, torch.float32), (torch.float32, torch.bfloat16)):
            beta = None if inputs.beta is None else inputs.beta.to(logits)
            given = inputs._replace(beta=beta, log_decay=inputs.log_decay.to(logits))
            recurrent_step(Step(given, maps, inputs.initial_state.to(state)))
        maps, out = maps._replace(lower_bound=-5.0), torch.empty_like(inputs.v)
        recurrent_step(Step(packed, maps, pool, slots, 0, None, slots[:, 0], out))
        for write in (False, True):
            move(pool, inputs.initial_state, slots[:, 0], 0, write)
    return found


def of(calls: dict[int, list[Call]]) -> Calls:
    """Every launch of the calls for a target, once."""

    def launched(capability: int) -> Iterator[tuple[object, Callable[[], list[Launch]]]]:
        seen: set[str] = set()
        for call in calls[capability]:

            def new(call: Call = call) -> list[Launch]:
                found = {repr(launch): launch for launch in launches(call, capability)}
                found = {name: launch for name, launch in found.items() if name not in seen}
                seen.update(found)
                return list(found.values())

            yield asdict(call), new

    return launched


if __name__ == "__main__":
    main(
        short=of(SHORT), long=of(dict.fromkeys(TARGETS, LONG)),
        steps=lambda capability: ((str(x), partial(step_launches, x)) for x in LOGITS),
    )  # fmt: skip
