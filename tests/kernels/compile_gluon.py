"""Compile the fused forward for a GPU that need not be here; print JSON lines.

A program of its own: Triton's interpreter, in which the tests run, cannot be left again.
"""

import json
import sys

import torch
from ahead import compiled, recording

from deltarule.ops.delta_rule.gluon import stage
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.plan import Call, new_plan

TARGET = 90
# erase, decay, unit norm, tokens, K = V, packed
CALLS = {
    "gated": ("tied", "head", False, 128, 128, False),
    "small gated": ("tied", "head", False, 128, 64, False),
    "plain": ("none", "none", False, 128, 128, False),
    "delta": ("tied", "none", False, 128, 128, False),
    "decay": ("none", "head", False, 128, 128, False),
    "gated unit ragged": ("tied", "head", True, 100, 128, False),
    "gated unit packed": ("tied", "head", True, 128, 128, True),
    "delta unit": ("tied", "none", True, 128, 128, False),
    "decay unit packed": ("none", "head", True, 128, 128, True),
    "small plain": ("none", "none", False, 128, 64, False),
    "small gated unit packed": ("tied", "head", True, 128, 64, True),
}


def inputs_of(erase: str, decay: str, unit: bool, tokens: int, size: int, packed: bool) -> Inputs:
    """Tensors that nobody fills."""
    q, v = (torch.empty(1, tokens, heads, size, dtype=torch.bfloat16) for heads in (2, 4))
    gate = torch.empty(1, tokens, 4)
    offsets = torch.zeros(3, dtype=torch.int32) if packed else None
    state = torch.empty(2 if packed else 1, 4, size, size)
    beta, decays = gate if erase == "tied" else None, gate if decay == "head" else None
    return Inputs(
        q, q, v, beta, None, None, decays, state, offsets, 1, size**-0.5, unit, False
    )  # fmt: skip


def main(names: list[str]) -> None:
    """Print one JSON object a line for each call."""
    for name in names or list(CALLS):
        inputs = inputs_of(*CALLS[name])
        assert stage.why_not_form(inputs) is None
        with recording() as launches:
            stage.forward(Call(inputs, new_plan(inputs)))
        report = compiled(launches[-1], TARGET)
        print(json.dumps({"call": name, **report._asdict()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
