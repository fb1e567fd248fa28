"""`deltarule doctor`: the shipped kernels on this GPU against the float64 definition.

A compiler can turn a right kernel into a wrong program on one GPU. Each configuration is run
forward and backward, dense and packed, and held to the bars of the tests; what fails is refused
from then on.

A bar in half precision is a multiple of the yardstick's error in the same draw: a ratio of two
random numbers, and of their largest at that. Of the 300 gradients by beta or by a head's decay in a
draw of two heads a few large ones decide, and the ratio, some 0.7 on average, spreads so far that
one draw in ten is over the bar with kernels that round no more than they must. So a draw has many
heads; and its states are as large as a few writes make them, for larger ones would leave the errors
of all but the first tokens unseen. The ratio then spreads by some 5 %.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.doctor import bars, chunked
from deltarule.ops.delta_rule.implementations import (
    Request,
    configuration_name,
    recurrence,
    run_reference,
)
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.pack import pack
from deltarule.ops.runtime.machine import triton_version
from deltarule.processes import gpu_is_lost
from deltarule.shapes import RecurrentOutput

# Whole chunks, as most calls are made of: their tiles are fetched by a GPU's copy engine.
DENSE = 192
# Off the chunk grid, with a sequence of nothing and one of a whole chunk.
LENGTHS = (70, 0, 64, 17)
# With two value heads each: 4800 gradients by the decay of a head.
KEY_HEADS = 16
DTYPES = ("bfloat16", "float16", "float32")
SIZES = ((16, 16), (32, 32), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512))
ERASES = (("none", 1), ("tied", 1), ("tied", 2), ("tied", 3), ("tied", 4), ("free", 1))
BROKEN = (
    "the last kernel has broken this process's connection to the GPU: leave out --processes 0, so "
    "that each kernel runs in another process"
)

NAMES = ("q", "k", "v", "beta", "a", "b", "log_decay", "initial_state")
# Heads times entries of their states, of which the loop over tokens keeps all: 1.2 GiB in float64.
STATES_AT_ONCE = 32 * 128 * 128

Run = Callable[[Inputs], RecurrentOutput]


class Configuration(NamedTuple):
    """What is compiled together: all calls that differ in it run other kernels."""

    erase: str
    decay: str
    n_steps: int
    dtype: str
    key_size: int
    value_size: int


class Verdict(NamedTuple):
    """The worst of one configuration's results: its error as a multiple of the bar."""

    name: str
    passed: bool
    error: str | None
    times_bar: float
    seconds: float


def commonest() -> list[Configuration]:
    """The 24 that most models run: the published rules in bfloat16, then other sizes and types."""
    single = [("tied", "head"), ("tied", "none"), ("tied", "channel"), ("none", "head")]
    single += [("none", "channel"), ("none", "none"), ("free", "channel")]
    rules = [*((*rule, 1) for rule in single), ("tied", "head", 2)]
    found = [Configuration(*rule, "bfloat16", 128, 128) for rule in rules]
    found += [Configuration(*rule, "bfloat16", 64, 64) for rule in rules]
    found += [
        Configuration("tied", decay, 1, dtype, 64, 64)
        for dtype in ("float32", "float16")
        for decay in ("head", "none")
    ]
    found += [
        Configuration("tied", "head", 1, "bfloat16", *size) for size in ((128, 256), (256, 256))
    ]
    found.append(Configuration("tied", "none", 1, "bfloat16", 256, 256))
    found.append(Configuration("tied", "none", 2, "bfloat16", 128, 128))

    def slow_to_compile(of: Configuration) -> tuple[bool, bool, int]:
        return of.erase == "free" or of.decay == "channel", of.dtype == "float32", of.key_size

    # What takes longest comes first, so that no process is left alone with it at the end.
    return sorted(found, key=slow_to_compile, reverse=True)


def every() -> list[Configuration]:
    grid = [
        Configuration(erase, decay, n_steps, dtype, *size)
        for dtype in DTYPES
        for size in SIZES
        for erase, n_steps in ERASES
        for decay in ("none", "head", "channel")
    ]
    return list(dict.fromkeys(commonest() + grid))


def draw(
    of: Configuration, lengths: tuple[int, ...], device: torch.device, norm: bool, heads: int = 1
) -> Inputs:
    """Random inputs of a configuration, the same every time; one row without lengths.

    `heads` is the number of key heads, of two value heads each.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, sequences = sum(lengths) or DENSE, len(lengths) or 1
    rows, size = tokens * of.n_steps, (1, tokens, 2 * heads)
    dtype: torch.dtype = getattr(torch, of.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    unit = F.normalize(normal(*size, of.key_size), dim=-1)
    decay_shape = {"none": None, "head": size, "channel": (*size, of.key_size)}[of.decay]
    free = of.erase == "free"
    given = [
        normal(1, tokens, heads, of.key_size),
        F.normalize(normal(1, rows, heads, of.key_size), dim=-1),
        normal(1, rows, 2 * heads, of.value_size),
        uniform(1, rows, 2 * heads) if of.erase == "tied" else None,
        -unit if free else None,
        unit * uniform(*size, 1) if free else None,
    ]
    tensors = [None if x is None else x.to(device, dtype) for x in given]
    q, k, v, beta, a, b = tensors
    assert q is not None
    assert k is not None
    assert v is not None
    log_decay = None if decay_shape is None else -uniform(*decay_shape).to(device)
    state = state_of(normal(sequences, 2 * heads, of.value_size, of.key_size)).to(device)
    offsets = pack(lengths).to(device) if lengths else None
    options = of.n_steps, of.key_size**-0.5, norm and not free, False
    return Inputs(q, k, v, beta, a, b, log_decay, state, offsets, *options)


def state_of(normal: Tensor) -> Tensor:
    """Random numbers as large as the entries of v k^T with a k of unit norm."""
    return normal * normal.shape[-1] ** -0.5


def exact_run(inputs: Inputs) -> RecurrentOutput:
    return run_reference(Request(inputs))


def yardstick_run(inputs: Inputs) -> RecurrentOutput:
    """The chunked algorithm in PyTorch, its operands rounded to the inputs' dtype."""
    return chunked.run(inputs, 64, inputs.q.dtype)


def results(run: Run, inputs: Inputs, weights: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Outputs, the final state and the gradients of a random sum of both."""
    leaves = {
        name: x.detach().clone().requires_grad_()
        for name in NAMES
        if (x := getattr(inputs, name)) is not None
    }
    o, state = run(inputs._replace(**leaves))
    assert state is not None
    d_o, d_state = weights[0].to(o.dtype), weights[1].to(state.dtype)
    loss = (o * d_o).sum() + (state * d_state).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    named = dict(zip((f"d{name}" for name in leaves), gradients, strict=True))
    return {"o": o, "final_state": state, **named}


def in_parts(run: Run, inputs: Inputs, weights: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """`results` of so many heads at a time as memory is meant for, which know nothing of others."""
    heads, each = inputs.q.shape[2], inputs.v.shape[2] // inputs.q.shape[2]
    size = each * inputs.n_steps * math.prod(inputs.state_shape[2:])
    at_once = max(STATES_AT_ONCE // size, 1)
    parts = []
    for first in range(0, heads, at_once):
        of_keys = slice(first, first + at_once)
        of_values = slice(first * each, (first + at_once) * each)
        cut = {
            name: x[:, of_values] if name == "initial_state" else x[:, :, place]
            for name in NAMES
            for place in (of_keys if name in ("q", "k") else of_values,)
            if (x := getattr(inputs, name)) is not None
        }
        part = weights[0][:, :, of_values], weights[1][:, of_values]
        parts.append(results(run, inputs._replace(**cut), part))
    return {
        name: torch.cat([part[name] for part in parts], 1 if name.endswith("state") else 2)
        for name in parts[0]
    }


def in_float64(inputs: Inputs) -> Inputs:
    return inputs._replace(
        **{name: x.double() for name in NAMES if (x := getattr(inputs, name)) is not None}
    )


def triton_run(inputs: Inputs) -> RecurrentOutput:
    return recurrence.run(inputs, "triton", True)


def fused_run(inputs: Inputs) -> RecurrentOutput:
    """The warp-specialised forward, however small the call."""
    return recurrence.run(inputs, "gluon", False)


def times_bars(
    inputs: Inputs, run: Callable[[Inputs], RecurrentOutput] = triton_run
) -> dict[str, float]:
    """The error of every result of the kernels as a multiple of what it may be."""
    generator, dtype = torch.Generator().manual_seed(1), inputs.q.dtype
    shapes = inputs.output_shape, inputs.state_shape
    d_o, d_state = (torch.randn(shape, generator=generator).to(inputs.q.device) for shape in shapes)
    weights = d_o.to(dtype), state_of(d_state)
    found = results(run, inputs, weights)
    exact = in_parts(exact_run, in_float64(inputs), weights)
    if dtype == torch.float32:
        return {
            name: bars.relative_rms(x, exact[name]) / full_bar(name, dtype)
            for name, x in found.items()
        }
    own = in_parts(yardstick_run, inputs, weights)
    return {name: times_yardstick(name, found[name], exact[name], own[name]) for name in found}


def full_bar(name: str, dtype: torch.dtype) -> float:
    return (bars.GRADIENT if name.startswith("d") else bars.FORWARD)[dtype]


def times_yardstick(name: str, x: Tensor, exact: Tensor, own: Tensor) -> float:
    """The worse of both measures, each as a multiple of what the yardstick allows."""
    factor = bars.YARDSTICK_GRADIENT if name.startswith("d") else bars.YARDSTICK_FORWARD
    least = full_bar(name, torch.float32)
    mean = bars.relative_rms(x, exact) / max(factor * bars.relative_rms(own, exact), least)
    bar = max(bars.YARDSTICK_LARGEST * bars.relative_largest(own, exact), least)
    return max(mean, bars.relative_largest(x, exact) / bar)


def examine(of: Configuration, device: torch.device) -> Verdict:
    """Run one configuration dense, and packed with unit norm; the worst result decides."""
    start = time.perf_counter()
    # Triton's interpreter, which takes its time over every head, has no compiler to be wrong.
    heads = KEY_HEADS if device.type == "cuda" else 1
    inputs = draw(of, (), device, False, heads)
    name, worst, error = configuration_name(inputs), 0.0, None
    calls = {"dense": inputs, "packed": draw(of, LENGTHS, device, True, heads)}
    runs = [(kind, call, triton_run) for kind, call in calls.items()]
    if device.type == "cuda":
        from deltarule.ops.delta_rule.gluon.stage import why_not, why_unasked_never

        # Where there is such a forward for the call and this GPU, and calls may take it.
        if why_unasked_never(inputs) is None and why_not(inputs) is None:
            runs += [(f"{kind}, fused", call, fused_run) for kind, call in calls.items()]
    for kind, call, run in runs:
        try:
            found = times_bars(call, run)
        except torch.OutOfMemoryError:
            # Says nothing about the kernels.
            raise
        except Exception as problem:  # A kernel may fail in any way; that is a finding too.
            message = str(problem).splitlines() or [""]
            error, worst = f"{kind}: {type(problem).__name__}: {message[0]}", math.inf
            break
        tensor = max(found, key=lambda key: found[key])
        if not found[tensor] <= worst:
            worst = found[tensor]
            if not worst <= 1.0:
                error = f"{tensor} ({kind}) is {worst:.3g} times over its bar"
    return Verdict(name, error is None, error, worst, time.perf_counter() - start)


def examined(configurations: Iterable[Configuration], device: torch.device) -> Iterator[Verdict]:
    for configuration in configurations:
        verdict = examine(configuration, device)
        yield verdict
        if not verdict.passed and gpu_is_lost():
            raise ValueError(BROKEN)


def known_bad(capability: tuple[int, int]) -> str | None:
    """What is known of the installed Triton on this GPU; None if nothing is."""
    version = tuple(int(part) for part in triton_version().split(".")[:3] if part.isdigit())
    if capability[0] == 9 and (3, 4, 0) <= version <= (3, 7, 0):
        return (
            f"Triton {triton_version()} is known to miscompile gated backward kernels on Hopper "
            "(3.4.0 to 3.7.0); these kernels avoid the known form, and the doctor is the check"
        )
    return None
