"""One case of one peer: what a process of its own does."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import adapters, timing
from bench.cases import OPERATIONS, Shape, Tensors, draw
from bench.results import BOTH, FORWARD
from deltarule.doctor.bars import relative_rms
from deltarule.processes import gpu_is_lost

# Inputs of all runs together exceed the cache of any GPU so far, up to a number of copies.
ROTATED_BYTES, MOST_COPIES = 256 * 2**20, 64
# What a message of an error is cut to.
REASON = 300

Row = dict[str, Any]
Run = Callable[[], object]


class Setting(NamedTuple):
    """What holds for all cases of a process."""

    peer: str
    impl: str
    device: str
    repeats: int


class Timed(NamedTuple):
    """A case set up: the peer's side, and arguments in as many copies as fill the cache."""

    side: adapters.Side
    copies: list[Tensors]

    def forward(self, arguments: Tensors) -> adapters.Result:
        with torch.no_grad():
            return self.side.call(arguments)

    def forward_backward(self, arguments: Tensors, grad: Tensor) -> object:
        """One call, and the gradients of all its inputs."""
        leaves = [x for x in arguments.values() if x.requires_grad]
        return torch.autograd.grad(adapters.output(self.side.call(arguments)), leaves, grad)

    def runs(self, backward: bool) -> list[Run]:
        """Calls that take turns."""
        if not backward:
            return [partial(self.forward, x) for x in self.copies]
        grad = torch.randn_like(adapters.output(self.forward(self.copies[0])))
        return [partial(self.forward_backward, x, grad) for x in self.copies]


def attempt(case: Row, setting: Setting) -> Row:
    return attempted(lambda: KINDS[case["kind"]](case, setting))


def attempted(run: Callable[[], Row]) -> Row:
    """Figures, or the reason why there are none; what the run has left on a GPU is free again."""
    try:
        return run()
    except Exception as error:
        return {"error": reason(error)}
    finally:
        if torch.cuda.is_available() and not gpu_is_lost():
            torch.cuda.empty_cache()


def reason(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:REASON]


def set_up(case: Row, setting: Setting, *, backward: bool) -> Timed:
    side = adapters.side(setting.peer, case["operation"], setting.impl)
    inputs = draw(OPERATIONS[case["operation"]], Shape(*case["shape"]), device=setting.device)
    size = sum(x.nbytes for x in inputs.values())
    count = 1 if setting.device == "cpu" else min(max(ROTATED_BYTES // size, 1), MOST_COPIES)
    asks = backward and side.entry.no_backward is None

    def copy() -> Tensors:
        arguments = side.prepare({name: x.clone() for name, x in inputs.items()})
        return {
            name: x.detach().requires_grad_(asks and x.is_floating_point())
            for name, x in arguments.items()
        }

    return Timed(side, [copy() for _ in range(count)])


def time_case(case: Row, setting: Setting) -> Row:
    """One pass of an operation at a shape: forward, or forward and backward."""
    backward = case["backward"]
    timed = set_up(case, setting, backward=backward)
    if backward and (why := timed.side.entry.no_backward) is not None:
        return {BOTH: {"error": why}}
    return {BOTH if backward else FORWARD: pass_figures(timed.runs(backward), setting)}


def pass_figures(runs: Sequence[Run], setting: Setting) -> Row:
    """Seconds of the first call, memory, and both clocks; what fails is given with its reason."""
    try:
        row: Row = {"first_s": timing.host_seconds(runs[0]), "extra_MiB": timing.extra_mib(runs[0])}
    except Exception as error:
        return {"error": reason(error)}
    clocks = {"eager_ms": timing.eager_ms, "graph_ms": timing.graph_ms}
    if setting.device == "cpu":
        del clocks["graph_ms"]
    for name, clock in clocks.items():
        try:
            row[name] = clock(runs, setting.repeats)
        except Exception as error:
            row[f"{name}_error"] = reason(error)
    return row


def overhead_case(case: Row, setting: Setting) -> Row:
    """What the host spends on calls that give the GPU next to nothing to do: forward, and both."""
    timed = set_up(case, setting, backward=False)
    row: Row = {"host_us": timing.host_us(timed.runs(False)[0], setting.repeats)}
    if timed.side.entry.no_backward is None:
        run = set_up(case, setting, backward=True).runs(True)[0]
        row["host_both_us"] = timing.host_us(run, setting.repeats)
        # Without the hop to the engine's thread for the GPU and back.
        with torch.autograd.set_multithreading_enabled(False):
            row["host_one_thread_us"] = timing.host_us(run, setting.repeats)
    return row


def cold_case(case: Row, setting: Setting) -> Row:
    """The first forward and backward call of a process, imports and the GPU's context done."""
    timed, o = set_up(case, setting, backward=True), Shape(*case["shape"])
    size = o.batch, o.tokens, o.value_heads, o.value_size
    grad = torch.randn(size, device=setting.device, dtype=torch.bfloat16)
    run = partial(timed.forward_backward, timed.copies[0], grad)
    return {"seconds": timing.host_seconds(run)}


def error_case(case: Row, setting: Setting) -> Row:
    """Relative RMS error of o, the final state and every gradient against the float64 loop."""
    name = case["operation"]
    inputs = draw(OPERATIONS[name], Shape(*case["shape"]), device=setting.device, seed=1)
    side, exactly = adapters.side(setting.peer, name, setting.impl), adapters.exact_side(name)

    def errors(with_gradients: bool) -> Row:
        exact = results(exactly.through, widened(inputs), with_gradients)
        found = results(side.through, inputs, with_gradients)
        return {x: relative_rms(found[x], exact[x]) for x in exact if x in found}

    if name == "decode" or side.entry.no_backward is not None:
        return {"errors": errors(with_gradients=False)}
    try:
        return {"errors": errors(with_gradients=True)}
    except Exception as error:
        # A peer may refuse the backward pass alone.
        return {"errors": errors(with_gradients=False), "backward_error": reason(error)}


def widened(inputs: Tensors) -> Tensors:
    return {name: x.double() for name, x in inputs.items()}


def results(
    operator: Callable[[Tensors], tuple[Tensor, Tensor | None]],
    inputs: Tensors,
    with_gradients: bool,
) -> Tensors:
    """o, the state, and the gradients of sum(o * g) for one g that both sides are given."""
    leaves = {name: x.detach().clone().requires_grad_(with_gradients) for name, x in inputs.items()}
    o, state = operator(leaves)
    named = {"o": o.detach()} | ({} if state is None else {"state": state.detach()})
    if with_gradients:
        generator = torch.Generator().manual_seed(2)
        grad = torch.randn(o.shape, generator=generator).bfloat16().to(o.device, o.dtype)
        gradients = torch.autograd.grad(o, list(leaves.values()), grad)
        named |= {f"grad {name}": x for name, x in zip(leaves, gradients, strict=True)}
    return named


def ceilings_case(case: Row, setting: Setting) -> Row:
    """The device, and the two rates that bound everything on it."""
    rates = timing.copy_bandwidth() / 1e12, timing.matrix_rate() / 1e12
    told = {"device": torch.cuda.get_device_name()}
    return told | dict(zip(("copy_TB_s", "matrix_TFLOP_s"), rates, strict=True))


def model_case(case: Row, setting: Setting) -> Row:
    # Whoever times another kind, a first call above all, has not loaded a model before.
    from bench.model import time_model

    return time_model(case, setting.peer, setting.device)


KINDS: dict[str, Callable[[Row, Setting], Row]] = {
    "time": time_case, "error": error_case, "overhead": overhead_case, "cold": cold_case,
    "ceilings": ceilings_case, "model": model_case,
}  # fmt: skip
