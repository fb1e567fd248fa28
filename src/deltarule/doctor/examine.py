"""`deltarule doctor`: the shipped kernels on this GPU against the float64 definition.

A compiler can turn a right kernel into a wrong program on one GPU. Each configuration is run
forward and backward, dense and packed, and held to the bars of the tests; what fails is refused
from then on.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.kernels.inputs import Inputs
from deltarule.kernels.machine import triton_version
from deltarule.ops.pack import pack
from deltarule.ops.registered import recurrence
from deltarule.reference import bars, chunked, recurrent
from deltarule.shapes import RecurrentOutput

# Off the chunk grid, with a sequence of nothing and one of a whole chunk.
LENGTHS = (70, 0, 64, 17)
NAMES = ("q", "k", "v", "beta", "a", "b", "log_decay", "initial_state")
DTYPES = ("bfloat16", "float16", "float32")
SIZES = ((16, 16), (32, 32), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512))
ERASES = (("none", 1), ("tied", 1), ("tied", 2), ("tied", 3), ("tied", 4), ("free", 1))
BROKEN = (
    "the last kernel has broken this process's connection to the GPU: examine the rest in "
    "processes of their own, without --processes 0"
)


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
    rules = [
        ("tied", "head", 1), ("tied", "none", 1), ("tied", "channel", 1), ("none", "head", 1),
        ("none", "channel", 1), ("none", "none", 1), ("free", "channel", 1), ("tied", "head", 2),
    ]  # fmt: skip
    found = [Configuration(*rule, "bfloat16", 128, 128) for rule in rules]
    found += [Configuration(*rule, "bfloat16", 64, 64) for rule in rules]
    found += [
        Configuration("tied", decay, 1, dtype, 64, 64)
        for dtype in ("float32", "float16") for decay in ("head", "none")
    ]  # fmt: skip
    found += [
        Configuration("tied", "head", 1, "bfloat16", *size) for size in ((128, 256), (256, 256))
    ]
    found.append(Configuration("tied", "none", 1, "bfloat16", 256, 256))
    found.append(Configuration("tied", "none", 2, "bfloat16", 128, 128))
    return sorted(found, key=slow_to_compile, reverse=True)


def slow_to_compile(of: Configuration) -> tuple[bool, bool, int]:
    """What takes longest comes first, so that no process is left alone with it at the end."""
    return of.erase == "free" or of.decay == "channel", of.dtype == "float32", of.key_size


def every() -> list[Configuration]:
    """The commonest first, then the whole grid."""
    grid = [
        Configuration(erase, decay, n_steps, dtype, *size)
        for dtype in DTYPES
        for size in SIZES
        for erase, n_steps in ERASES
        for decay in ("none", "head", "channel")
    ]
    return list(dict.fromkeys(commonest() + grid))


def draw(of: Configuration, lengths: tuple[int, ...], device: torch.device, norm: bool) -> Inputs:
    """Random inputs of a configuration, the same every time; one row without lengths."""
    generator = torch.Generator().manual_seed(0)
    tokens, sequences = sum(lengths) or 150, len(lengths) or 1
    rows, size = tokens * of.n_steps, (1, tokens, 2)
    dtype: torch.dtype = getattr(torch, of.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    unit = F.normalize(normal(*size, of.key_size), dim=-1)
    decay_shape = {"none": None, "head": size, "channel": (*size, of.key_size)}[of.decay]
    free = of.erase == "free"
    given = [
        normal(1, tokens, 1, of.key_size), F.normalize(normal(1, rows, 1, of.key_size), dim=-1),
        normal(1, rows, 2, of.value_size),
        uniform(1, rows, 2) if of.erase == "tied" else None,
        -unit if free else None, unit * uniform(*size, 1) if free else None,
    ]  # fmt: skip
    tensors = [None if x is None else x.to(device, dtype) for x in given]
    q, k, v, beta, a, b = tensors
    assert q is not None
    assert k is not None
    assert v is not None
    return Inputs(
        q, k, v, beta, a, b, None if decay_shape is None else -uniform(*decay_shape).to(device),
        normal(sequences, 2, of.value_size, of.key_size).to(device),
        pack(lengths).to(device) if lengths else None,
        of.n_steps, of.key_size**-0.5, norm and not free, False,
    )  # fmt: skip


Run = Callable[[Inputs], RecurrentOutput]


def triton_run(inputs: Inputs) -> RecurrentOutput:
    """The kernels, whatever earlier findings say."""
    return recurrence(inputs, "triton", True)


def plain_run(module: Any, inputs: Inputs, options: dict[str, Any]) -> RecurrentOutput:
    """One of the two reference modules."""
    x = inputs
    shared = {
        "log_decay": x.log_decay, "scale": x.scale, "initial_state": x.initial_state,
        "cu_seqlens": x.cu_seqlens, **options,
    }  # fmt: skip
    if x.a is not None:
        return module.dplr(x.q, x.k, x.v, a=x.a, b=x.b, **shared)
    return module.delta_rule(
        x.q, x.k, x.v, beta=x.beta, n_steps=x.n_steps, normalize_qk=x.normalize_qk, **shared
    )


def exact_run(inputs: Inputs) -> RecurrentOutput:
    """The definition."""
    return plain_run(recurrent, inputs, {})


def yardstick_run(inputs: Inputs) -> RecurrentOutput:
    """The chunked algorithm in PyTorch, its operands rounded to the inputs' dtype."""
    return plain_run(chunked, inputs, {"chunk_size": 64, "matmul_dtype": inputs.q.dtype})


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


def in_float64(inputs: Inputs) -> Inputs:
    """The same rounded inputs, to compute exactly with."""
    return inputs._replace(
        **{name: x.double() for name in NAMES if (x := getattr(inputs, name)) is not None}
    )


def times_bars(inputs: Inputs) -> dict[str, float]:
    """The error of every result of the kernels as a multiple of what it may be."""
    generator, dtype = torch.Generator().manual_seed(1), inputs.q.dtype
    shapes = inputs.output_shape, inputs.state_shape
    d_o, d_state = (torch.randn(shape, generator=generator).to(inputs.q.device) for shape in shapes)
    weights = d_o.to(dtype), d_state
    found = results(triton_run, inputs, weights)
    exact = results(exact_run, in_float64(inputs), weights)
    if dtype == torch.float32:
        return {
            name: bars.relative_rms(x, exact[name]) / full_bar(name, dtype)
            for name, x in found.items()
        }
    own = results(yardstick_run, inputs, weights)
    return {name: times_yardstick(name, found[name], exact[name], own[name]) for name in found}


def full_bar(name: str, dtype: torch.dtype) -> float:
    """Of float32 inputs."""
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
    from deltarule.kernels.triton.verdicts import configuration_name

    start = time.perf_counter()
    inputs = draw(of, (), device, False)
    name, worst, error = configuration_name(inputs), 0.0, None
    for kind, call in (("dense", inputs), ("packed", draw(of, LENGTHS, device, True))):
        try:
            found = times_bars(call)
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
    """One verdict after the other, in this process.

    Raises:
        ValueError: A kernel has broken the GPU's context, and nothing can be examined after it.
    """
    for configuration in configurations:
        verdict = examine(configuration, device)
        yield verdict
        if not verdict.passed and not usable(device):
            raise ValueError(BROKEN)


def usable(device: torch.device) -> bool:
    """Whether the GPU still answers this process: no longer after an access outside its memory."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def known_bad(capability: tuple[int, int]) -> str | None:
    """What is known of the installed Triton on this GPU; None if nothing is."""
    version = tuple(int(part) for part in triton_version().split(".")[:3] if part.isdigit())
    if capability[0] == 9 and (3, 4, 0) <= version <= (3, 7, 0):
        return (
            f"Triton {triton_version()} is known to miscompile gated backward kernels on Hopper "
            "(3.4.0 to 3.7.0); these kernels avoid the known form, and the doctor is the check"
        )
    return None
