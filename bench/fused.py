"""The fused kernels beside Triton's stages on an H100 or H200, every variant in one run.

    python -m bench.fused --output FILE

What is off until it is timed is on in "fused"; "chosen" is what calls take as they are.
"""

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.cases import Operation, Shape, draw
from bench.sides import Case, run_cases
from deltarule import delta_rule
from deltarule.ops.dispatch import forget_calls


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
CALLS = {
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


def case_of(call: Call, device: str = "cuda") -> Case:
    """Every variant on the same random arguments, called from Python."""
    operation = Operation(
        "delta rule", "head" if call.decay else "none", "tied" if call.erase else "none", (), (),
        call.steps,
    )  # fmt: skip
    inputs = draw(operation, Shape("", *call[:5], call.size), device=device)
    given: dict[str, Any] = {"n_steps": call.steps, "normalize_qk": call.norm}
    if call.lengths:
        given["cu_seqlens"] = torch.tensor([0, *call.lengths], device=device).cumsum(0).int()
    if not call.erase:
        given["beta"] = None

    def run(inputs: Mapping[str, Any]) -> Tensor:
        return delta_rule(**inputs, **given, return_state=False).o

    variants = dict.fromkeys(("triton", "fused", "chosen"), run)
    return Case(inputs, variants, captured=False, within=variant)


CASES = {title: partial(case_of, call) for title, call in CALLS.items()}

if __name__ == "__main__":
    run_cases("bench.fused", __doc__, "fused", CASES)
