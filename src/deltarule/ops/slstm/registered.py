"""The registered operator behind `slstm`."""

from typing import Any

import torch
from torch import Tensor

from deltarule.ops.operators import Operator, differentiated
from deltarule.ops.registration import Backward, Gradients, Rules
from deltarule.ops.slstm import torch as plain
from deltarule.ops.slstm.inputs import SLSTMInputs
from deltarule.shapes import RecurrentOutput


def backend_of(name: str, inputs: SLSTMInputs) -> Any:
    if name == "torch":
        return plain
    from deltarule.ops.slstm.triton import heads, split

    return split if split.takes(inputs) else heads


def backward(given: Backward[SLSTMInputs], save: bool, backend: str) -> Gradients:
    (d_o, d_final), (states,), inputs = given.gradients, given.saved, given.inputs
    shape = inputs.gates.shape
    d_o = states.new_zeros(shape[:3] + shape[4:]) if d_o is None else d_o.to(inputs.dtype)
    if d_final is None:
        d_final = torch.zeros_like(inputs.before)
    # The output before each token, [B T, H, D].
    sequence, token = inputs.places
    shifted = torch.cat([torch.zeros_like(states[:1, :, 0]), states[:-1, :, 0]])
    first = (token == 0)[:, None, None]
    h_before = torch.where(first, inputs.before[sequence, :, 0], shifted)
    # What the input and that output give to all gates, [B T, H, 4, D]; zero at padding.
    weights = inputs.recurrent.to(inputs.dtype).flatten(1, 2)
    seen = (h_before.transpose(0, 1) @ weights.mT).transpose(0, 1)
    raw = inputs.gates.to(inputs.dtype).flatten(0, 1) + seen.view(-1, *shape[2:])
    if inputs.lengths is not None:
        raw = torch.where((token < inputs.lengths[sequence])[:, None, None, None], raw, 0)
    raw = raw.contiguous()
    d_gates, d_before = backend_of(backend, inputs).backward(d_o, d_final, inputs, raw, states)
    # [H, 4 D, B T] [H, B T, D]: every token's gate and the output that it saw.
    d_recurrent = d_gates.flatten(-2).permute(1, 2, 0) @ h_before.transpose(0, 1)
    d_recurrent = d_recurrent.view(inputs.recurrent.shape).to(inputs.recurrent.dtype)
    return d_gates.view(shape).to(inputs.gates.dtype), d_recurrent, d_before.contiguous()


def fake(inputs: SLSTMInputs, save: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, heads, _, size = inputs.gates.shape
    rows = batch * tokens if save else 0
    o = inputs.gates.new_empty(batch, tokens, heads, size)
    return o, torch.empty_like(inputs.before), inputs.before.new_empty(rows, heads, 4, size)


options = {"save": bool, "backend": str}
rules = Rules(2, (2,), SLSTMInputs._fields[:3], otherwise='use impl="reference"')
operator: Operator[SLSTMInputs] = Operator(
    "slstm", SLSTMInputs,
    # Outputs, the last state, and the states of all tokens with `save`.
    lambda inputs, save, backend: backend_of(backend, inputs).forward(inputs, save),
    backward, fake, returned=3, options=options, rules=rules,
)  # fmt: skip


def run(inputs: SLSTMInputs, backend: str) -> RecurrentOutput:
    """Call the operator, keeping states only where a backward may follow."""
    save = torch._C._are_functorch_transforms_active() or differentiated(inputs[:3])
    return RecurrentOutput(*operator(*inputs, save, backend))
