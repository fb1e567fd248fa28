"""One small case of each kernel, for `compute-sanitizer --tool memcheck python sanitize.py`.

With two numbers i and n it runs the i-th of n parts of the cases. `--tool racecheck` takes a third
word, `triton`, which leaves the kernels in Gluon out: it does not see what their roles wait for.

Without the caching allocator every tensor is an allocation of its own, so that an access beside it
is one that the sanitizer sees. Run it once alone before: what is compiled then lies in the cache.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Read when PyTorch takes its first memory.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from deltarule.doctor.examine import LENGTHS, Configuration, draw, fused_run, results, triton_run
from deltarule.ops.delta_rule.gate_logits import NO_MAPS, Step
from deltarule.ops.delta_rule.gluon import gradient_stage, stage
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.step import recurrent_step
from deltarule.ops.dispatch import forget_calls
from neighbours import MAKERS, with_gradients
from ops.contract import OPERATORS, gradients

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERASES = (("none", 1), ("tied", 2), ("free", 1))
RULES = [(*erase, decay) for erase in ERASES for decay in ("none", "head", "channel")]
# As few heads and as many tokens as are split into segments.
SPLIT = (1100,)
# How the names of those cases begin that run kernels in Gluon.
IN_GLUON = ("fused: ", "by name: ")


def main(part: str = "0", parts: str = "1", kernels: str = "") -> None:
    """Run every case, or one of so many parts of them, and say which."""
    every = [case for case in cases() if kernels != "triton" or not case[0].startswith(IN_GLUON)]
    chosen = every[int(part) :: int(parts)]
    for name, run in chosen:
        print(name, flush=True)
        run()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    print(f"{len(chosen)} cases ran", flush=True)


def finish() -> Tensor:
    """Have autograd's thread let go of the last case, so that the program may end.

    A thread that drops a tensor of Python's while the interpreter ends is unwound inside of C++,
    which aborts: "terminate called without an active exception" (pytorch/pytorch issue 190489). The
    thread of a GPU takes one graph after the other: once it has gone through another, it holds none
    of those before. The tensor that this one ends in is returned, for the caller to keep.
    """
    leaf = torch.zeros((), device=DEVICE, requires_grad=True)
    (leaf + leaf).backward()
    return leaf


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and calls."""
    for rule in RULES:
        erase, n_steps, decay = rule
        wide, odd = (
            Configuration(erase, decay, n_steps, dtype, *sizes)
            for dtype, sizes in (("bfloat16", (64, 64)), ("float16", (20, 12)))
        )
        exact = odd._replace(dtype="float32")
        # Whole tiles, which a copy engine fetches, and those of which a part is masked.
        yield f"dense: {wide}", lambda of=wide: both(dense(of, 128))
        yield f"packed: {odd}", lambda of=odd: both(draw(of, LENGTHS, DEVICE, True))
        yield f"dense: {exact}", lambda of=exact: both(dense(of, 150))
        yield f"split: {wide}", lambda of=wide: both(dense(of, *SPLIT))
    for erase in ("none", "tied"):
        for size in (64, 128):
            of = Configuration(erase, "head", 1, "bfloat16", size, size)
            for tokens in (128, 150):
                yield f"fused: {of}, {tokens}", lambda x=(of, tokens): fused(dense(*x))
        of = Configuration(erase, "channel", 1, "bfloat16", 128, 128)
        for tokens in (128, 150):
            yield f"by name: {of}, {tokens}", lambda x=(of, tokens): by_name(dense(*x))
        yield f"step: {odd}", lambda of=odd: step(of)
    for name, make in MAKERS.items():
        yield f"neighbour: {name}", lambda make=make: neighbour(make().to(torch.float16))
    for lengths in (None, LENGTHS):
        for name in ("all", "mesa", "ttt", "ttt of two maps", "titans", "titans of two maps"):
            yield f"{name}: {lengths}", lambda x=(name, lengths): beside(*x)


def dense(of: Configuration, tokens: int) -> Inputs:
    """One row."""
    return draw(of, (tokens,), DEVICE, False)._replace(cu_seqlens=None)


def fused(inputs: Inputs) -> None:
    """Both through the kernels in Gluon, where they run, however small the call."""
    before = stage.fills, gradient_stage.LEAST_PAIRS
    stage.fills, gradient_stage.LEAST_PAIRS = (lambda inputs, processors: True), 0
    forget_calls()
    both(inputs)
    stage.fills, gradient_stage.LEAST_PAIRS = before
    forget_calls()


def by_name(inputs: Inputs) -> None:
    """The forward in Gluon, where it runs, of decays in its fast form and beyond."""
    if stage.why_not(inputs) is None:
        for strength in (1.0, 20.0):
            fused_run(inputs._replace(log_decay=inputs.log_decay * strength))


def both(inputs: Inputs) -> None:
    """Forward and backward."""
    weights = torch.randn(inputs.output_shape), torch.randn(inputs.state_shape)
    results(triton_run, inputs, tuple(x.to(DEVICE) for x in weights))


def step(of: Configuration) -> None:
    """Two tokens for rows in a pool, one of them for no state at all."""
    inputs = draw(of, (2,), DEVICE, False)._replace(initial_state=None, cu_seqlens=None)
    rows = inputs.each(lambda x, _: x[[0, 0]])
    slots, indices = 3, torch.tensor([2, -1], device=DEVICE)
    for dtype in (torch.float32, torch.bfloat16):
        pool = torch.zeros(slots, *inputs.state_shape[1:], dtype=dtype, device=DEVICE)
        recurrent_step(Step(rows, NO_MAPS, pool, indices))


def neighbour(case: object) -> None:
    """Forward and backward of a fused operator."""
    tensors: dict[str, Tensor] = {name: x.to(DEVICE) for name, x in case.tensors.items()}
    weights = [torch.randn_like(x) for x in case.fused(tensors)]
    with_gradients(case.fused, tensors, weights)


def beside(name: str, lengths: tuple[int, ...] | None) -> None:
    """Forward and backward of an operator beside the delta rule."""
    x = OPERATORS[name].draw(lengths=lengths)
    gradients(OPERATORS[name], {n: y.to(DEVICE, of(y.dtype)) for n, y in x.items()})


def of(dtype: torch.dtype) -> torch.dtype:
    """Float32, or a whole number."""
    return torch.float32 if dtype.is_floating_point else dtype


if __name__ == "__main__":
    torch.manual_seed(0)
    main(*sys.argv[1:])
    kept = finish()
