"""Calls of registered operators: around the operator where nothing needs it, else through it.

A registered operator costs the host time. Where no compiler, mode or transform would see it, a call
is its forward alone, or a plain autograd function of forward and backward.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from deltarule.ops.dispatch import are_plain_eager
from deltarule.ops.folding import Fold
from deltarule.ops.registration import Backward, Gradients, Inputs, Registered, Rules
from deltarule.shapes import RecurrentOutput


class Operator(Registered[Inputs]):
    """A registered operator, to be called with the fields of its inputs one by one."""

    @cached_property
    def apply(self) -> Any:
        """The call as a plain autograd function: forward and backward without the operator."""

        def forward(ctx: Any, *args: Any) -> Any:
            outputs = self.run_forward(args)
            self.keep(ctx, args, outputs)
            return self.result(outputs)

        rules = {"forward": staticmethod(forward), "backward": staticmethod(self.differentiate)}
        name = f"Eager{self.name.title().replace('_', '')}"
        return direct(type(name, (torch.autograd.Function,), rules))

    def __call__(self, *args: Any) -> Any:
        tensors = args[: self.tensors]
        if torch.autograd.forward_ad._current_level >= 0:
            if any(map(is_dual, tensors)):
                raise NotImplementedError(self.message)
        elif are_plain_eager(tensors):
            if self.backward is not None and differentiated(tensors):
                return self.apply(*args)
            return self.result(self.run_forward(args))
        if self.backward is not None and torch._C._are_functorch_transforms_active():
            return self.result(self.transformed.apply(*args))
        return self.result(self.operator(*args))

    def result(self, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            return outputs
        return outputs[0] if self.rules.outputs == 1 else tuple(outputs[: self.rules.outputs])

    def run_forward(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        return self.forward(self.inputs(*args[: self.fields]), *args[self.fields :])

    def gradients(
        self, gradients: Gradients, saved: Sequence[Tensor], given: Sequence[Any],
        wanted: Sequence[bool], spent: bool = False,
    ) -> Gradients:  # fmt: skip
        assert self.backward is not None
        inputs, options = self.inputs(*given[: self.fields]), given[self.fields :]
        return self.backward(Backward(gradients, saved, wanted, inputs, spent), *options)

    def keep(self, ctx: Any, args: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        ctx.set_materialize_grads(False)
        tensors = args[: self.tensors]
        if not self.all_kept:
            tensors = [x if kept else None for x, kept in zip(tensors, self.kept, strict=True)]
        ctx.save_for_backward(*[outputs[i] for i in self.rules.saved], *tensors)
        ctx.numbers = args[self.tensors : len(self.names)]

    def differentiate(self, ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return self.derivatives(ctx, ctx.saved_tensors, gradients)

    def derivatives(
        self, ctx: Any, kept: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> tuple[Any, ...]:
        """The same with what was saved, which may be taken out of ctx only once."""
        out: list[Any] = [None] * len(self.names)
        gradients, needed = tuple(gradients[: self.rules.outputs]), ctx.needs_input_grad
        if all(d is None for d in gradients):
            return tuple(out)
        count = len(self.rules.saved)
        wanted = [needed[i] for i in self.places]
        for x, y in self.alike:
            wanted[self.places.index(y)] |= needed[x]
        saved, given = kept[:count], (*kept[count:], *ctx.numbers)
        if torch._C._are_functorch_transforms_active():
            found = self.transformed_backward.apply(*gradients, *saved, *given, wanted)
        elif torch.is_grad_enabled() or not are_plain_eager((*gradients, *kept)):
            found = self.backward_operator(*gradients, *saved, *given, wanted)
        else:
            found = self.gradients(gradients, saved, given, wanted, is_spent(ctx))
        for i, dx, want in zip(self.places, found, wanted, strict=True):
            out[i] = dx if want else None
        for x, y in self.alike:
            out[x] = out[y] if needed[x] else None
        return tuple(out)


class Backend(NamedTuple):
    """What runs a recurrence: forward, backward, and the shape of what the first saves."""

    # Inputs, and whether to save: outputs, final state, and what the backward is then spared.
    forward: Callable[[Any, bool], tuple[Tensor, Tensor, Tensor]]
    # Gradients by outputs and final state (None: zeros), inputs, what was saved, and is it spent.
    backward: Callable[[Tensor, Tensor | None, Any, Tensor, bool], Gradients]
    saved_shape: Callable[[Any], tuple[int, ...]]


class Recurrence(Operator[Inputs]):
    """An operator over tokens that leaves a state: outputs, final state, and what it saves.

    The inputs have an output_shape, a state_shape and the dtype of the state; the first
    `differentiable` of their fields have gradients. The name of a backend is an argument.
    """

    def __init__(
        self, name: str, inputs: type[Inputs], backend_of: Callable[[str], Backend],
        differentiable: int, fold: Fold,
    ) -> None:  # fmt: skip
        self.backend_of, self.differentiable = backend_of, differentiable
        gradients = tuple(get_type_hints(inputs))[:differentiable]
        rules = Rules(2, (2,), gradients, otherwise='use impl="reference"')
        super().__init__(
            name, inputs, lambda x, save, backend: self.backend_of(backend).forward(x, save),
            self.run_back, self.like, returned=3, rules=rules,
            options={"save": bool, "backend": str}, fold=fold,
        )  # fmt: skip

    def keep(self, ctx: Any, args: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        super().keep(ctx, args, outputs)
        ctx.lends = outputs[0].is_cuda and not torch.cuda.is_current_stream_capturing()

    def run_back(self, given: Backward[Any], save: bool, backend: str) -> Gradients:
        (d_o, d_final), inputs = given.gradients, given.inputs
        d_o = inputs.v.new_zeros(inputs.output_shape) if d_o is None else d_o.contiguous()
        d_final = None if d_final is None else d_final.contiguous()
        return self.backend_of(backend).backward(d_o, d_final, inputs, given.saved[0], given.spent)

    def like(self, inputs: Any, save: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
        saved_shape = self.backend_of(backend).saved_shape
        shape = saved_shape(inputs) if save else (0, *inputs.state_shape[1:])
        empty, dtype = inputs.v.new_empty, inputs.dtype
        state, saved = empty(inputs.state_shape, dtype=dtype), empty(shape, dtype=dtype)
        return empty(inputs.output_shape), state, saved

    def run(self, inputs: Inputs, backend: str, save_states: bool = True) -> RecurrentOutput:
        """Call it, saving only where that is asked for and a backward may follow."""
        save = save_states and differentiated(inputs[: self.differentiable])
        # The chunks of a folded batch lie in another order than those of its parts.
        save = save and not torch._C._are_functorch_transforms_active()
        return RecurrentOutput(*self(*inputs, save, backend))


def direct(function: Any) -> Any:
    """What applies an autograd function without PyTorch's search for transforms, under none."""
    return super(torch.autograd.Function, function).apply


def differentiated(tensors: Sequence[object]) -> bool:
    """Whether a backward may follow a call with these tensors."""
    if torch.is_grad_enabled():
        for x in tensors:
            if getattr(x, "requires_grad", False):
                return True
    return False


def is_spent(ctx: Any) -> bool:
    """Whether nobody touches what a forward saved after this backward: gradients may lie there.

    Autograd may keep its graph; a CUDA graph of either pass reads or writes there in every replay.
    """
    if not getattr(ctx, "lends", False) or torch.cuda.is_current_stream_capturing():
        return False
    kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return kept is not None and not kept()


def is_dual(x: Tensor | None) -> bool:
    return x is not None and torch.autograd.forward_ad.unpack_dual(x).tangent is not None
