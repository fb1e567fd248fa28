"""The one registered operator behind `delta_rule` and `dplr`.

The backend's name is an argument; its forward and backward are plain functions of `Inputs`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.torch import layout
from deltarule.ops.delta_rule.torch import passes as torch_kernels
from deltarule.ops.folding import Fold
from deltarule.ops.registration import Gradients, Operator, Rules, differentiated
from deltarule.shapes import RecurrentOutput


class Backend(NamedTuple):
    """Forward, backward, and the shape of the states that the forward saves for the backward."""

    forward: Callable[[Inputs, bool], tuple[Tensor, Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Inputs, Tensor], tuple[Tensor | None, ...]]
    saved_shape: Callable[[Inputs], tuple[int, ...]]


@cache
def _triton() -> Any:
    """The kernels in Triton, which is an extra: imported where it runs."""
    from deltarule.ops.delta_rule.triton import passes

    return passes


BACKENDS = {
    "torch": Backend(torch_kernels.forward, torch_kernels.backward, layout.chunk_states_shape),
    "triton": Backend(
        lambda *given: _triton().forward(*given),
        lambda *given: _triton().backward(*given),
        lambda *given: _triton().saved_shape(*given),
    ),
    # Its backward is that of a forward that saved nothing.
    "gluon": Backend(
        lambda inputs, save: _triton().fused_forward(inputs),
        lambda *given: _triton().backward(*given),
        lambda inputs: (0, *inputs.state_shape[1:]),
    ),
}


def recording_of(inputs: Inputs, save: bool = False) -> Any:
    """The recorded launches of a forward, if the Triton kernels ran it twice."""
    return _triton().recording_of(inputs, save)


def forward(inputs: Inputs, save: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final state, and the states saved for the backward: none without `save`."""
    return BACKENDS[backend].forward(inputs, save)


def backward(
    gradients: Gradients, saved: Sequence[Tensor], wanted: Sequence[bool], inputs: Inputs,
    save: bool, backend: str,
) -> Gradients:  # fmt: skip
    """Gradients by the eight tensors from q to initial_state."""
    d_o, d_final = gradients
    d_o = inputs.v.new_zeros(inputs.output_shape) if d_o is None else d_o.contiguous()
    if d_final is None:
        d_final = inputs.q.new_zeros(inputs.state_shape, dtype=inputs.dtype)
    return BACKENDS[backend].backward(d_o, d_final.contiguous(), inputs, saved[0])


def fake(inputs: Inputs, save: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and types of what the forward returns."""
    shape = BACKENDS[backend].saved_shape(inputs) if save else (0, *inputs.state_shape[1:])
    return (
        inputs.v.new_empty(inputs.output_shape),
        inputs.q.new_empty(inputs.state_shape, dtype=inputs.dtype),
        inputs.q.new_empty(shape, dtype=inputs.dtype),
    )


def fold_axis(name: str, x: Tensor, packed: bool) -> int:
    """Rows fold into the batch; packed sequences follow each other in its one row."""
    return int(packed and name not in ("initial_state", "final"))


def repeated_offsets(cu_seqlens: Tensor, size: int) -> Tensor:
    """Those of the packed sequences, `size` times one after the other."""
    lengths = cu_seqlens.diff().repeat(size)
    return torch.cat([cu_seqlens[:1], lengths.cumsum(0, dtype=cu_seqlens.dtype)])


OTHERWISE = 'use impl="reference"'
recurrence_operator: Operator[Inputs] = Operator(
    "recurrence", Inputs, forward, backward, fake, options={"save": bool, "backend": str},
    returned=3, rules=Rules(2, (2,), Inputs._fields[:8], otherwise=OTHERWISE),
    fold=Fold(fold_axis, repeated_offsets, ("o", "final")),
)  # fmt: skip


def recurrence(inputs: Inputs, backend: str, save_states: bool) -> RecurrentOutput:
    """Call the registered operator, saving states only where asked and a backward may follow."""
    save = (
        save_states
        and differentiated(inputs[:8])
        # The chunks of a folded batch lie in another order than those of its parts.
        and not torch._C._are_functorch_transforms_active()
    )
    return RecurrentOutput(*recurrence_operator(*inputs, save, backend))
