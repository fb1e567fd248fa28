"""The registered operator behind `selective_scan`, and its backward operator.

Flat like `deltarule.ops.delta_rule.registered`; under vmap the mapped axis becomes heads, which are
independent of each other and which every argument has.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.delta_rule.registered import (
    NO_DERIVATIVE,
    fold_one,
    is_dual,
    no_second_derivative,
    nothing_to_keep,
    transformed,
    unfold,
)
from deltarule.ops.selective_scan import torch as torch_kernels
from deltarule.ops.selective_scan.inputs import ScanInputs
from deltarule.ops.selective_scan.torch import chunk_states_shape
from deltarule.shapes import RecurrentOutput

# The tensors that have a gradient come first in the arguments.
DIFFERENTIABLE = 9


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


@torch.library.custom_op("deltarule::selective_scan", mutates_args=())
def scan_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor | None,
    A: Tensor | None,
    value_log_decay: Tensor | None,
    log_decay: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    save: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final state, and the states saved for the backward: none without `save`."""
    inputs = ScanInputs(
        q, k, v, delta, A, value_log_decay, log_decay, beta, initial_state, cu_seqlens, scale
    )
    return backend_of(backend).forward(inputs, save)


@torch.library.custom_op("deltarule::selective_scan_backward", mutates_args=())
def scan_backward_op(
    d_o: Tensor,
    d_final: Tensor,
    saved: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor | None,
    A: Tensor | None,
    value_log_decay: Tensor | None,
    log_decay: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    backend: str,
) -> list[Tensor]:
    """Gradients by the nine tensors from q to initial_state; an empty tensor for None."""
    inputs = ScanInputs(
        q, k, v, delta, A, value_log_decay, log_decay, beta, initial_state, cu_seqlens, scale
    )
    gradients = backend_of(backend).backward(d_o, d_final, inputs, saved)
    return [v.new_empty(0) if dx is None else dx for dx in gradients]


@scan_op.register_fake
def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, (save, backend) = ScanInputs(*args[:11]), args[11:]
    none = 0, *inputs.state_shape[1:]
    shape = backend_of(backend).saved_shape(inputs) if save else none
    return (
        inputs.v.new_empty(inputs.v.shape),
        inputs.v.new_empty(inputs.state_shape, dtype=inputs.dtype),
        inputs.v.new_empty(shape, dtype=inputs.dtype),
    )


@scan_backward_op.register_fake
def _backward_fake(d_o: Tensor, d_final: Tensor, saved: Tensor, *args: Any) -> list[Tensor]:
    tensors = args[:DIFFERENTIABLE]
    return [d_o.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(output[2], *inputs[:10])
    ctx.options = inputs[10], inputs[12]
    ctx.output_shapes = [(x.shape, x.dtype) for x in output[:2]]


def _backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None, _: Any) -> tuple[Any, ...]:
    saved, *tensors = ctx.saved_tensors
    if d_o is None and d_final is None:
        return (None,) * 13
    filled = [
        tensors[2].new_zeros(shape, dtype=dtype) if d is None else d.contiguous()
        for d, (shape, dtype) in zip((d_o, d_final), ctx.output_shapes, strict=True)
    ]
    transformed = torch._C._are_functorch_transforms_active()
    run: Any = TransformedScanBackward.apply if transformed else scan_backward_op
    gradients = run(*filled, saved, *tensors, *ctx.options)
    wanted = [
        dx if x is not None and needed else None
        for x, dx, needed in zip(tensors, gradients, ctx.needs_input_grad, strict=False)
    ]
    return (*wanted, None, None, None, None)


scan_op.register_autograd(_backward, setup_context=_setup_context)


scan_backward_op.register_autograd(no_second_derivative)

TransformedScan = transformed(scan_op, _setup_context, _backward)
TransformedScanBackward = transformed(scan_backward_op, nothing_to_keep, no_second_derivative)


def scan(inputs: ScanInputs, backend: str) -> RecurrentOutput:
    """Call the registered operator, saving states only where a backward may follow."""
    tensors = [x for x in inputs[:DIFFERENTIABLE] if isinstance(x, Tensor)]
    if torch.autograd.forward_ad._current_level >= 0 and any(map(is_dual, tensors)):
        raise NotImplementedError(NO_DERIVATIVE)
    if torch._C._are_functorch_transforms_active():
        run: Any = TransformedScan.apply
        return RecurrentOutput(*run(*inputs, False, backend)[:2])
    save = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return RecurrentOutput(*scan_op(*inputs, save, backend)[:2])


def head_axis(position: int, x: Tensor) -> int:
    """Axis of the heads in the argument or gradient at this position, from q to initial_state."""
    if position == DIFFERENTIABLE - 1:
        return 1
    return 0 if x.ndim == 3 else 2


@scan_op.register_vmap
def _forward_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    tensors = _fold(info.batch_size, in_dims, args)
    o, final, saved = scan_op(*tensors, args[9], args[10], False, args[12])
    unfolded = unfold(o, info.batch_size, 2), unfold(final, info.batch_size, 1)
    return (*unfolded, saved), (0, 0, None)


@scan_backward_op.register_vmap
def _backward_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    size = info.batch_size
    d_o = fold_one(args[0], in_dims[0], size, 2)
    d_final = fold_one(args[1], in_dims[1], size, 1)
    tensors = _fold(size, in_dims[3:], args[3:])
    saved = args[2].new_empty(0, *d_final.shape[1:])
    gradients = scan_backward_op(d_o, d_final, saved, *tensors, *args[12:])
    unfolded = [
        dx if x is None else unfold(dx, size, head_axis(i, dx))
        for i, (x, dx) in enumerate(zip(tensors, gradients, strict=True))
    ]
    return unfolded, [None if x is None else 0 for x in tensors]


def _fold(size: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> list[Tensor | None]:
    """Make the mapped axis of the tensors q to initial_state more heads."""
    if in_dims[DIFFERENTIABLE] is not None:
        raise NotImplementedError("vmap over cu_seqlens: give every row the same offsets")
    folded: list[Tensor | None] = []
    for i, (x, dim) in enumerate(zip(args[:DIFFERENTIABLE], in_dims, strict=False)):
        alone = x if x is None or dim is None else x.select(dim, 0)
        folded.append(None if x is None else fold_one(x, dim, size, head_axis(i, alone)))
    return folded
