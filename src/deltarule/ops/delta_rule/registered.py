"""The one registered operator behind `delta_rule` and `dplr`, and its backward operator.

Both are flat: tensors and numbers in, tensors out, so that torch.compile, vmap and distributed
wrappers see one opaque node. The backend's name is an argument; its forward and backward are plain
functions of `Inputs`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.torch import layout
from deltarule.ops.delta_rule.torch import passes as torch_kernels
from deltarule.ops.eager import unwatched
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
}


def recording_of(inputs: Inputs) -> Any:
    """The recorded launches of a forward that saves nothing, if the Triton kernels ran it twice."""
    return _triton().recording_of(inputs)


NO_DERIVATIVE = (
    "a registered operator has a first reverse-mode derivative only: for forward-mode or second "
    'derivatives use impl="reference"'
)


@torch.library.custom_op("deltarule::recurrence", mutates_args=())
def recurrence_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    n_steps: int,
    scale: float,
    normalize_qk: bool,
    batch_invariant: bool,
    save: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final state, and the states saved for the backward: none without `save`."""
    inputs = Inputs(
        q, k, v, beta, a, b, log_decay, initial_state, cu_seqlens,
        n_steps, scale, normalize_qk, batch_invariant,
    )  # fmt: skip
    return BACKENDS[backend].forward(inputs, save)


@torch.library.custom_op("deltarule::recurrence_backward", mutates_args=())
def recurrence_backward_op(
    d_o: Tensor,
    d_final: Tensor,
    saved: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    n_steps: int,
    scale: float,
    normalize_qk: bool,
    batch_invariant: bool,
    backend: str,
) -> list[Tensor]:
    """Gradients by the eight tensors from q to initial_state; an empty tensor for None."""
    inputs = Inputs(
        q, k, v, beta, a, b, log_decay, initial_state, cu_seqlens,
        n_steps, scale, normalize_qk, batch_invariant,
    )  # fmt: skip
    gradients = BACKENDS[backend].backward(d_o, d_final, inputs, saved)
    return [
        q.new_empty(0) if x is None or dx is None else dx
        for x, dx in zip(inputs[:8], gradients, strict=True)
    ]


@recurrence_op.register_fake
def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, (save, backend) = Inputs(*args[:13]), args[13:]
    shape = BACKENDS[backend].saved_shape(inputs) if save else (0, *inputs.state_shape[1:])
    return (
        inputs.v.new_empty(inputs.output_shape),
        inputs.q.new_empty(inputs.state_shape, dtype=inputs.dtype),
        inputs.q.new_empty(shape, dtype=inputs.dtype),
    )


@recurrence_backward_op.register_fake
def _backward_fake(d_o: Tensor, d_final: Tensor, saved: Tensor, *args: Any) -> list[Tensor]:
    return [args[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in args[:8]]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(output[2], *inputs[:9])
    ctx.options = (*inputs[9:13], inputs[14])
    ctx.output_shapes = [(x.shape, x.dtype) for x in output[:2]]


def _backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None, _: Any) -> tuple[Any, ...]:
    saved, *tensors = ctx.saved_tensors
    if d_o is None and d_final is None:
        return (None,) * 15
    # new_zeros of a saved tensor: a gradient that nobody asked for keeps that tensor's kind.
    d_o, d_final = (
        tensors[0].new_zeros(shape, dtype=dtype) if d is None else d.contiguous()
        for d, (shape, dtype) in zip((d_o, d_final), ctx.output_shapes, strict=True)
    )
    gradients = run_backward(d_o, d_final, saved, (*tensors, *ctx.options))
    wanted = [
        dx if x is not None and needed else None
        for x, dx, needed in zip(tensors[:8], gradients, ctx.needs_input_grad, strict=False)
    ]
    return (*wanted, *(None,) * 7)


def run_backward(d_o: Tensor, d_final: Tensor, saved: Tensor, arguments: tuple[Any, ...]) -> Any:
    """The backward operator, or its backend where nothing would see the operator."""
    if torch._C._are_functorch_transforms_active():
        run: Any = TransformedBackward.apply
        return run(d_o, d_final, saved, *arguments)
    *inputs, backend = arguments
    if torch.is_grad_enabled() or not unwatched((d_o, d_final, saved, *inputs[:9])):
        return recurrence_backward_op(d_o, d_final, saved, *arguments)
    return BACKENDS[backend].backward(d_o, d_final, Inputs(*inputs), saved)


recurrence_op.register_autograd(_backward, setup_context=_setup_context)


def no_second_derivative(ctx: Any, *_: Any) -> None:
    """The derivative of a registered backward operator."""
    raise NotImplementedError(NO_DERIVATIVE)


recurrence_backward_op.register_autograd(no_second_derivative)


def transformed(operator: Any, setup_context: Any, backward: Any) -> Any:
    """An operator in the form that torch.func.grad and its kin look for."""

    class Transformed(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> tuple[Tensor, ...]:
            return tuple(operator(*args))

    # Autograd looks for plain functions in the class, whose names the arguments have taken.
    rules = {"setup_context": staticmethod(setup_context), "backward": staticmethod(backward)}
    return type("Transformed", (Transformed,), rules)


def nothing_to_keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """A backward operator has no second derivative to save for."""


TransformedRecurrence = transformed(recurrence_op, _setup_context, _backward)
TransformedBackward = transformed(recurrence_backward_op, nothing_to_keep, no_second_derivative)


def recurrence(inputs: Inputs, backend: str, save_states: bool) -> RecurrentOutput:
    """Call the registered operator, saving states only where asked and a backward may follow."""
    if torch.autograd.forward_ad._current_level >= 0 and any(map(is_dual, inputs[:8])):
        raise NotImplementedError(NO_DERIVATIVE)
    if torch._C._are_functorch_transforms_active():
        run: Any = TransformedRecurrence.apply
        return RecurrentOutput(*run(*inputs, False, backend)[:2])
    differentiated = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in inputs[:8]
    )
    save = save_states and differentiated
    if not unwatched(inputs[:9]):
        o, final, _ = recurrence_op(*inputs, save, backend)
    elif differentiated:
        eager: Any = EagerRecurrence.apply
        o, final, _ = eager(*inputs, save, backend)
    else:
        o, final, _ = BACKENDS[backend].forward(inputs, save)
    return RecurrentOutput(o, final)


class EagerRecurrence(torch.autograd.Function):
    """The registered operator's forward and backward without the operator around them."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments and outputs of `recurrence_op`."""
        output = BACKENDS[args[14]].forward(Inputs(*args[:13]), args[13])
        _setup_context(ctx, args, output)
        return output

    backward = staticmethod(_backward)


def is_dual(x: Tensor | None) -> bool:
    """Whether forward-mode differentiation follows x."""
    return x is not None and torch.autograd.forward_ad.unpack_dual(x).tangent is not None


@recurrence_op.register_vmap
def _forward_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    tensors = _fold(info.batch_size, in_dims, args[:9])
    # The chunks of a folded batch lie in another order than those of its parts: save none.
    o, final, saved = recurrence_op(*tensors, *args[9:13], False, args[14])
    axis = _fold_axis(args[8])
    unfolded = unfold(o, info.batch_size, axis), unfold(final, info.batch_size, 0)
    return (*unfolded, saved), (0, 0, None)


@recurrence_backward_op.register_vmap
def _backward_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    size, axis = info.batch_size, _fold_axis(args[11])
    d_o = fold_one(args[0], in_dims[0], size, axis)
    d_final = fold_one(args[1], in_dims[1], size, 0)
    tensors = _fold(size, in_dims[3:12], args[3:12])
    saved = args[2].new_empty(0, *d_final.shape[1:])
    gradients = recurrence_backward_op(d_o, d_final, saved, *tensors, *args[12:])
    unfolded = [
        dx if x is None else unfold(dx, size, axis if i < 7 else 0)
        for i, (x, dx) in enumerate(zip(args[3:11], gradients, strict=True))
    ]
    return unfolded, [None if x is None else 0 for x in args[3:11]]


def _fold(size: int, in_dims: tuple[int | None, ...], tensors: tuple[Any, ...]) -> list[Any]:
    """Fold the mapped axis of the tensors q to cu_seqlens into the batch, or packed tokens."""
    cu_seqlens = tensors[8]
    axis = _fold_axis(cu_seqlens)
    if in_dims[8] is not None:
        raise NotImplementedError("vmap over cu_seqlens: give every row the same offsets")
    folded = [
        None if x is None else fold_one(x, dim, size, axis if i < 7 else 0)
        for i, (x, dim) in enumerate(zip(tensors[:8], in_dims[:8], strict=True))
    ]
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff().repeat(size)
        cu_seqlens = torch.cat([cu_seqlens[:1], lengths.cumsum(0, dtype=cu_seqlens.dtype)])
    return [*folded, cu_seqlens]


def _fold_axis(cu_seqlens: Tensor | None) -> int:
    """Rows fold into the batch; packed sequences follow each other in its one row."""
    return 0 if cu_seqlens is None else 1


def fold_one(x: Tensor, dim: int | None, size: int, axis: int) -> Tensor:
    """Fold the mapped axis of x into `axis`."""
    mapped = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return mapped.movedim(0, axis).flatten(axis, axis + 1)


def unfold(x: Tensor, size: int, axis: int) -> Tensor:
    """The inverse of `fold_one`, the mapped axis first."""
    return x.unflatten(axis, (size, -1)).movedim(axis, 0)
