"""The fused kernels beside Triton's stages on an H100 or H200, every variant in one run.

    python -m bench.fused --output FILE

Of each call: milliseconds of the forward and of both passes, and the memory that both take. What is
off until it is timed is on in "fused"; "chosen" is what calls take as they are.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import results
from bench.timing import eager_ms, extra_mib
from deltarule import delta_rule
from deltarule.ops.dispatch import forget_calls

REPEATS = 20
# Batch, tokens, key heads, value heads, channels, writes a token, decays, erase, unit norm, and of
# packed calls the lengths.
CASES: dict[str, tuple[Any, ...]] = {
    "gated 8x4096 16/16": (8, 4096, 16, 16, 128, 1, True, True, False, ()),
    "gated 4x4096 16/64": (4, 4096, 16, 64, 128, 1, True, True, False, ()),
    "gated 8x4096 32/32 K=V=64": (8, 4096, 32, 32, 64, 1, True, True, False, ()),
    "no decay 8x4096 16/16": (8, 4096, 16, 16, 128, 1, False, True, False, ()),
    "no erase 8x4096 16/16": (8, 4096, 16, 16, 128, 1, True, False, False, ()),
    "gated, unit norm 8x4096 16/16": (8, 4096, 16, 16, 128, 1, True, True, True, ()),
    "gated, two writes 8x4096 16/16": (8, 4096, 16, 16, 128, 2, True, True, False, ()),
    "no decay, two writes 8x4096 16/16": (8, 4096, 16, 16, 128, 2, False, True, False, ()),
    "gated 8x4090 16/16": (8, 4090, 16, 16, 128, 1, True, True, False, ()),
    "gated packed 8 of 4096 16/16": (1, 32768, 16, 16, 128, 1, True, True, False, (4096,) * 8),
    "gated packed 250 and 262, 64 times, 16/16": (
        1, 32768, 16, 16, 128, 1, True, True, False, (250, 262) * 64,
    ),
    "gated packed 100 and 28, 256 times, 16/16": (
        1, 32768, 16, 16, 128, 1, True, True, False, (100, 28) * 256,
    ),
}  # fmt: skip


@contextlib.contextmanager
def variant(name: str) -> Iterator[None]:
    """Have calls take "triton", "fused" or what is "chosen"; afterwards all is as it was."""
    from deltarule.ops.delta_rule.gluon import stage

    on = name == "fused"
    settings = [
        (stage, "fills", lambda inputs, processors: on), (stage, "TRAINING", on),
        (stage, "STEPS_TIMED", 2),
    ]  # fmt: skip
    settings = [] if name == "chosen" else settings
    # Another tree, whose kernels lack a variant, may lack its constant, too.
    before = [(of, key, getattr(of, key)) for of, key, _ in settings if hasattr(of, key)]
    try:
        for of, key, value in settings:
            setattr(of, key, value)
        forget_calls()
        yield
    finally:
        for of, key, value in before:
            setattr(of, key, value)
        forget_calls()


def call_of(case: tuple[Any, ...], device: str = "cuda") -> dict[str, Any]:
    """Random arguments of `delta_rule`; keys of unit length."""
    batch, tokens, heads, value_heads, size, steps, decay, erase, norm, lengths = case
    rows = tokens * steps
    q = torch.randn(batch, tokens, heads, size, device=device)
    k = torch.nn.functional.normalize(torch.randn(batch, rows, heads, size, device=device), dim=-1)
    v = torch.randn(batch, rows, value_heads, size, device=device).bfloat16()
    gates = torch.rand(batch, rows, value_heads, device=device)
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).int() if lengths else None
    return {
        "q": q.bfloat16(), "k": k.bfloat16(), "v": v, "beta": gates if erase else None,
        "log_decay": -0.1 * gates[:, :tokens] if decay else None, "n_steps": steps,
        "normalize_qk": norm, "cu_seqlens": offsets,
    }  # fmt: skip


def forward(call: dict[str, Any]) -> Tensor:
    return delta_rule(**call, return_state=False).o


def both(call: dict[str, Any], weight: Tensor) -> tuple[Tensor, ...]:
    """The gradients of a weighted sum of o by all that may have one."""
    floating = {x: y for x, y in call.items() if isinstance(y, Tensor) and y.is_floating_point()}
    leaves = {name: x.detach().requires_grad_() for name, x in floating.items()}
    return torch.autograd.grad(forward(call | leaves), list(leaves.values()), weight)


def figures(case: tuple[Any, ...], device: str = "cuda") -> Iterator[tuple[str, results.Row]]:
    """Figures of each variant on the same arguments."""
    call = call_of(case, device)
    weight = torch.randn_like(forward(call))
    for name in ("triton", "fused", "chosen"):
        with variant(name):
            passes = partial(forward, call), partial(both, call, weight)
            once, twice = (eager_ms([run], REPEATS) for run in passes)
            extra = extra_mib(passes[1])
        yield name, {"forward_ms": once, "both_ms": twice, "both_extra_mib": extra}


def found(_: results.Row) -> Iterator[results.Found]:
    """The figures of all calls."""
    for call, case in CASES.items():
        for name, row in figures(case):
            yield name, {"kind": "fused", "call": call}, row


if __name__ == "__main__":
    results.run_program("bench.fused", __doc__, found)
