"""Compile the fused forward and the gradients for a GPU that need not be here; print JSON lines.

A program of its own: Triton's interpreter, in which the tests run, cannot be left again.
"""

import json
import sys

import torch
from ahead import compiled, recording

from deltarule.ops.delta_rule.gluon import gradient_stage, stage
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import stages
from deltarule.ops.delta_rule.triton.passes import kept_shapes, own_shapes
from deltarule.ops.delta_rule.triton.plan import WHOLE, Call, new_plan

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


def forward(inputs: Inputs) -> None:
    """Nothing is saved."""
    stage.forward(Call(inputs, new_plan(inputs)))


def save(inputs: Inputs) -> None:
    """With what a backward asks for."""
    stage.forward(kept(inputs), True)


def kept(inputs: Inputs) -> Call:
    """A call with room for what is saved."""
    call = Call(inputs, new_plan(inputs))
    shapes = kept_shapes(inputs, call.plan, True)
    call.values |= {name: torch.empty(*of[:1], dtype=of[1]) for name, of in shapes.items()}
    return call


def gradients(inputs: Inputs) -> None:
    """Of all chunks, if they are whole."""
    call = kept(inputs)
    shapes = own_shapes(call, call.plan.chunks, False)
    own = {name: torch.empty(*of[:1], dtype=of[1]) for name, of in shapes.items()}
    stages.new_gradients(call)
    call.values["d_o"] = call["d_v"]
    d_v = None if stages.scan_back_has_values(call) else call["d_v"]
    if gradient_stage.can(call):
        gradient_stage.add_gradients(call, own, d_v, WHOLE)


def main(names: list[str]) -> None:
    """Print one JSON object a line for each form of each call, or for those that are named."""
    for name, of in CALLS.items():
        inputs = inputs_of(*of)
        assert stage.why_not_form(inputs) is None
        for run in (forward, save, gradients):
            if names and f"{name} {run.__name__}" not in names:
                continue
            with recording() as launches:
                run(inputs)
            if launches:
                report = compiled(launches[-1], TARGET)._asdict()
                print(json.dumps({"call": f"{name} {run.__name__}", **report}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
