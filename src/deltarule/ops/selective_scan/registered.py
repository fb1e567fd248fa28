"""The registered operator behind `selective_scan`.

Under vmap the mapped axis becomes heads, which are independent of each other and which every
argument has.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.ops.folding import Fold
from deltarule.ops.registration import Gradients, Operator, Rules, differentiated
from deltarule.ops.selective_scan import torch as torch_kernels
from deltarule.ops.selective_scan.inputs import ScanInputs
from deltarule.ops.selective_scan.torch import chunk_states_shape
from deltarule.shapes import RecurrentOutput


class Backend(NamedTuple):
    """Forward, backward, and the shape of the states that the forward saves for the backward."""

    forward: Callable[[ScanInputs, bool], tuple[Tensor, Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, ScanInputs, Tensor], tuple[Tensor | None, ...]]
    saved_shape: Callable[[ScanInputs], tuple[int, ...]]


def backend_of(name: str) -> Backend:
    """Triton is an extra, imported where it runs."""
    if name == "torch":
        return Backend(torch_kernels.forward, torch_kernels.backward, chunk_states_shape)
    from deltarule.ops.selective_scan.triton import passes as triton_kernels

    return Backend(triton_kernels.forward, triton_kernels.backward, triton_kernels.saved_shape)


def forward(inputs: ScanInputs, save: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final state, and the states saved for the backward: none without `save`."""
    return backend_of(backend).forward(inputs, save)


def backward(
    gradients: Gradients, saved: Sequence[Tensor], wanted: Sequence[bool], inputs: ScanInputs,
    save: bool, backend: str,
) -> Gradients:  # fmt: skip
    """Gradients by the nine tensors from q to initial_state."""
    d_o, d_final = gradients
    d_o = inputs.v.new_zeros(inputs.v.shape) if d_o is None else d_o.contiguous()
    if d_final is None:
        d_final = inputs.v.new_zeros(inputs.state_shape, dtype=inputs.dtype)
    return backend_of(backend).backward(d_o, d_final.contiguous(), inputs, saved[0])


def fake(inputs: ScanInputs, save: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and types of what the forward returns."""
    shape = backend_of(backend).saved_shape(inputs) if save else (0, *inputs.state_shape[1:])
    return (
        inputs.v.new_empty(inputs.v.shape),
        inputs.v.new_empty(inputs.state_shape, dtype=inputs.dtype),
        inputs.v.new_empty(shape, dtype=inputs.dtype),
    )


def head_axis(name: str, x: Tensor, packed: bool) -> int:
    """Axis of the heads; what is constant over time has no others before it."""
    if name in ("initial_state", "final"):
        return 1
    return 0 if x.ndim == 3 else 2


def same_offsets(cu_seqlens: Tensor, size: int) -> Tensor:
    """More heads have the same sequences."""
    return cu_seqlens


scan_operator: Operator[ScanInputs] = Operator(
    "selective_scan", ScanInputs, forward, backward, fake, options={"save": bool, "backend": str},
    returned=3, rules=Rules(2, (2,), ScanInputs._fields[:9], otherwise='use impl="reference"'),
    fold=Fold(head_axis, same_offsets, ("o", "final")),
)  # fmt: skip


def scan(inputs: ScanInputs, backend: str) -> RecurrentOutput:
    """Call the registered operator, saving states only where a backward may follow."""
    transforms = torch._C._are_functorch_transforms_active()
    save = not transforms and differentiated(inputs[:9])
    return RecurrentOutput(*scan_operator(*inputs, save, backend))
