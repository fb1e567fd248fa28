"""The fused kernels beside Triton's stages on an H100 or H200, every variant in one run.

    python -m bench.fused --output FILE

Of each call: milliseconds of the forward and of both passes, and the memory that both take. What is
off until it is timed is on in "fused"; "chosen" is what calls take as they are.
"""

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import results
from bench.timing import both_passes, eager_ms, extra_mib
from deltarule import delta_rule
from deltarule.ops.dispatch import forget_calls

REPEATS = 20


class Call(NamedTuple):
    """Sizes of a call with `steps` writes a token; of packed calls the lengths of rows."""

    batch: int = 8
    tokens: int = 4096
    heads: int = 16
    value_heads: int = 16
    size: int = 128
    steps: int = 1
    decay: bool = True
    erase: bool = True
    norm: bool = False
    lengths: tuple[int, ...] = ()


PACKED = Call(1, 32768)
CASES = {
    "gated 8x4096 16/16": Call(),
    "gated 4x4096 16/64": Call(4, value_heads=64),
    "gated 8x4096 32/32 K=V=64": Call(heads=32, value_heads=32, size=64),
    "no decay 8x4096 16/16": Call(decay=False),
    "no erase 8x4096 16/16": Call(erase=False),
    "gated, unit norm 8x4096 16/16": Call(norm=True),
    "gated, two writes 8x4096 16/16": Call(steps=2),
    "no decay, two writes 8x4096 16/16": Call(steps=2, decay=False),
    "gated 8x4090 16/16": Call(tokens=4090),
    "gated packed 8 of 4096 16/16": PACKED._replace(lengths=(4096,) * 8),
    "gated packed 250 and 262, 64 times, 16/16": PACKED._replace(lengths=(250, 262) * 64),
    "gated packed 100 and 28, 256 times, 16/16": PACKED._replace(lengths=(100, 28) * 256),
}


@contextlib.contextmanager
def variant(name: str) -> Iterator[None]:
    """Have calls take "triton", "fused" or what is "chosen"; afterwards all is as it was."""
    from deltarule.ops.delta_rule.gluon import stage

    on = name == "fused"
    settings = {"fills": lambda inputs, processors: on, "TRAINING": on, "STEPS_TIMED": 2}
    # Another tree, whose kernels lack a variant, may lack its constant, too.
    before = {key: getattr(stage, key) for key in settings if hasattr(stage, key)}
    try:
        for key, value in settings.items() if name != "chosen" else ():
            setattr(stage, key, value)
        forget_calls()
        yield
    finally:
        for key, value in before.items():
            setattr(stage, key, value)
        forget_calls()


def figures(call: Call, device: str = "cuda") -> Iterator[tuple[str, results.Row]]:
    """Figures of each variant on the same random arguments, keys of unit length."""
    batch, tokens, heads, value_heads, size, steps, *_ = call
    rows = tokens * steps
    q = torch.randn(batch, tokens, heads, size, device=device).bfloat16()
    k = torch.nn.functional.normalize(torch.randn(batch, rows, heads, size, device=device), dim=-1)
    v = torch.randn(batch, rows, value_heads, size, device=device).bfloat16()
    gates = torch.rand(batch, rows, value_heads, device=device)
    tensors = {"q": q, "k": k.bfloat16(), "v": v}
    given: dict[str, Any] = {"n_steps": steps, "normalize_qk": call.norm, "return_state": False}
    if call.lengths:
        given["cu_seqlens"] = torch.tensor([0, *call.lengths], device=device).cumsum(0).int()
    if call.decay:
        tensors["log_decay"] = -0.1 * gates[:, :tokens]
    if call.erase:
        tensors["beta"] = gates
    else:
        given["beta"] = None

    def run(inputs: Mapping[str, Any]) -> Tensor:
        return delta_rule(**inputs, **given).o

    weight = torch.randn_like(v[:, :tokens])
    passes = partial(run, tensors), partial(both_passes, run, tensors, weight)
    for name in ("triton", "fused", "chosen"):
        with variant(name):
            once, twice = (eager_ms([timed], REPEATS) for timed in passes)
            extra = extra_mib(passes[1])
        yield name, {"forward_ms": once, "both_ms": twice, "both_extra_mib": extra}


def found(_: results.Row) -> Iterator[results.Found]:
    for title, call in CASES.items():
        for name, row in figures(call):
            yield name, {"kind": "fused", "call": title}, row


if __name__ == "__main__":
    results.run_program("bench.fused", __doc__, found)
