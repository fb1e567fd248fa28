"""One registration for every operator: a named tuple of inputs, a forward and a backward.

    outputs = forward(inputs)        gradients = backward(gradients by the outputs, inputs, saved)

The fields of the tuple give the schema. Registered are the operator and its backward operator, with
their fakes and their derivatives, so that torch.compile, export, modes and distributed wrappers see
one opaque node each; with a `Fold`, they have rules for vmap. Where nothing watches, a call is the
forward alone, or a plain autograd function of the two: a registered operator costs the host time
and would give nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

from deltarule.ops.dispatch import are_plain_eager
from deltarule.ops.folding import Fold, Folding, nothing_to_keep, transformed
from deltarule.shapes import RecurrentOutput

Inputs = TypeVar("Inputs", bound=tuple[Any, ...])
# A gradient that nobody asks for, or that there is none of.
Gradients = tuple[Tensor | None, ...]

SCHEMA = {
    Tensor: "Tensor", Tensor | None: "Tensor?", int: "SymInt", int | None: "SymInt?",
    float: "float", float | None: "float?", bool: "bool", str: "str", torch.dtype: "ScalarType",
}  # fmt: skip


class Rules(NamedTuple):
    """What autograd has to know of an operator.

    outputs: Those that have a gradient; they come first.
    saved: Places of the outputs that the backward is given.
    gradients: The inputs of which the backward returns gradients, in that order.
    alike: Inputs that share the gradient of another.
    forgotten: Input tensors that the backward is not given; of the shape of the first output that
        it is given, or else of the gradient, if they have a gradient.
    otherwise: What to do for a derivative that there is none of.
    """

    outputs: int = 1
    saved: tuple[int, ...] = ()
    gradients: tuple[str, ...] = ()
    alike: Mapping[str, str] = {}
    forgotten: tuple[str, ...] = ()
    otherwise: str = "use plain PyTorch, as the layers do in float64"


NO_RULES = Rules()
NO_OPTIONS: Mapping[str, Any] = {}


class Operator(Generic[Inputs]):
    """A registered operator, to be called with the fields of its inputs one by one.

    Args:
        name: In the library "deltarule"; the backward operator is called `name`_backward.
        inputs: The named tuple of the arguments, tensors first.
        forward: (inputs, *options) -> every output, those that have a gradient first.
        backward: (gradients by the outputs, saved outputs, which gradients are wanted, inputs,
            *options) -> gradients by the inputs that `rules` names. None: there is none.
        fake: (inputs, *options) -> outputs that have shapes and types alone.
        returned: How many outputs there are.
        rules: What autograd has to know.
        options: Names and types of further arguments.
        fold: How vmap runs it. None: as it runs the forward's own operations.
    """

    def __init__(
        self,
        name: str,
        inputs: type[Inputs],
        forward: Callable[..., tuple[Tensor, ...]],
        backward: Callable[..., Gradients] | None,
        fake: Callable[..., tuple[Tensor, ...]],
        *,
        returned: int = 1,
        rules: Rules = NO_RULES,
        options: Mapping[str, Any] = NO_OPTIONS,
        fold: Fold | None = None,
    ) -> None:
        """Register the operator and its backward operator."""
        self.inputs, self.forward, self.backward, self.fake = inputs, forward, backward, fake
        self.rules, self.fold, self.returned = rules, fold, returned
        hints = {**get_type_hints(inputs), **options}
        self.names, self.fields = list(hints), len(hints) - len(options)
        self.tensors = sum(hint in (Tensor, Tensor | None) for hint in hints.values())
        self.places = [self.names.index(x) for x in rules.gradients]
        self.alike = [(self.names.index(x), self.names.index(y)) for x, y in rules.alike.items()]
        self.kept = [x not in rules.forgotten for x in self.names[: self.tensors]]
        self.all_kept = all(self.kept)
        arguments = ", ".join(f"{SCHEMA[hint]} {x}" for x, hint in hints.items())
        results = ", ".join(["Tensor"] * returned)
        schema = f"({arguments}) -> {results if returned == 1 else f'({results})'}"
        self.operator = self.registered(name, schema, self.body, self.fake_body)
        if backward is not None:
            self.register_backward(name, hints)

    def registered(self, name: str, schema: str, body: Any, fake: Any) -> Any:
        """An operator of the library with its fake."""
        made = torch.library.custom_op(f"deltarule::{name}", body, mutates_args=(), schema=schema)
        made.register_fake(fake)
        return getattr(torch.ops.deltarule, name).default

    def register_backward(self, name: str, hints: Mapping[str, Any]) -> None:
        """The backward operator, and what derivatives and vmap make of both."""
        given = [f"Tensor? d_{i}" for i in range(self.rules.outputs)]
        given += [f"Tensor saved_{i}" for i in range(len(self.rules.saved))]
        for x, hint in hints.items():
            given.append(f"{'Tensor?' if hint is Tensor else SCHEMA[hint]} {x}")
        schema = f"({', '.join(given)}, bool[] wanted) -> Tensor[]"
        name_backward = f"{name}_backward"
        self.backward_operator = self.registered(
            name_backward, schema, self.backward_body, self.fake_backward
        )
        register = torch.library.register_autograd
        register(f"deltarule::{name}", self.differentiate, setup_context=self.set_up)
        register(f"deltarule::{name_backward}", self.no_derivative)
        if self.fold is not None:
            folding = Folding(self, self.fold)
            torch.library.register_vmap(f"deltarule::{name}", folding.vmap)
            torch.library.register_vmap(f"deltarule::{name_backward}", folding.vmap_backward)
        # Without a rule of its own, an operator is for vmap what its body does.
        of = (
            (self.operator, self.backward_operator)
            if self.fold
            else (self.body, self.backward_body)
        )
        self.transformed = transformed(of[0], self.set_up, self.differentiate)
        self.transformed_backward = transformed(of[1], nothing_to_keep, self.no_derivative)
        eager: Any = eager_function(self, f"Eager{name.title().replace('_', '')}")
        # Past the search for transforms: where there are any, nobody calls it.
        self.apply = super(torch.autograd.Function, eager).apply  # type: ignore[misc]

    def __call__(self, *args: Any) -> Any:
        """The outputs that have a gradient: one, or a tuple."""
        tensors = args[: self.tensors]
        if torch.autograd.forward_ad._current_level >= 0:
            if any(map(is_dual, tensors)):
                raise NotImplementedError(self.message)
        elif are_plain_eager(tensors):
            if self.backward is not None and differentiated(tensors):
                return self.apply(*args, None)
            return self.result(self.run_forward(args))
        if self.backward is not None and torch._C._are_functorch_transforms_active():
            return self.result(self.transformed.apply(*args))
        return self.result(self.operator(*args))

    def result(self, outputs: Any) -> Any:
        """Those of the outputs that a caller is given."""
        if isinstance(outputs, Tensor):
            return outputs
        return outputs[0] if self.rules.outputs == 1 else tuple(outputs[: self.rules.outputs])

    def body(self, *args: Any) -> Any:
        outputs = self.run_forward(args)
        return outputs[0] if self.returned == 1 else outputs

    def fake_body(self, *args: Any) -> Any:
        outputs = self.fake(self.inputs(*args[: self.fields]), *args[self.fields :])
        return outputs[0] if self.returned == 1 else outputs

    def run_forward(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        return self.forward(self.inputs(*args[: self.fields]), *args[self.fields :])

    def gradients(
        self,
        gradients: Gradients,
        saved: Sequence[Tensor],
        given: Sequence[Any],
        wanted: list[bool],
    ) -> Gradients:
        assert self.backward is not None
        inputs, options = self.inputs(*given[: self.fields]), given[self.fields :]
        return self.backward(gradients, saved, wanted, inputs, *options)

    def backward_body(self, *args: Any) -> list[Tensor]:
        """What the backward operator runs: an empty tensor stands for no gradient."""
        gradients, saved, given, wanted = self.split(args)
        found = self.gradients(gradients, saved, given, wanted)
        like = next(d for d in gradients if d is not None)
        return [
            like.new_empty(0) if dx is None or not want else dx
            for dx, want in zip(found, wanted, strict=True)
        ]

    def fake_backward(self, *args: Any) -> list[Tensor]:
        """What that is to a compiler: gradients in one piece."""
        gradients, saved, given, wanted = self.split(args)
        like = next(d for d in gradients if d is not None)
        shape_of = saved[0] if saved else like
        shaped = [x if kept else shape_of for x, kept in zip(given, self.kept, strict=False)]
        return [
            like.new_empty(0) if (x := shaped[i]) is None or not want else x.new_empty(x.shape)
            for i, want in zip(self.places, wanted, strict=True)
        ]

    def split(self, args: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        """The arguments of the backward operator: gradients, saved outputs, inputs, wanted."""
        outputs = self.rules.outputs
        first = outputs + len(self.rules.saved)
        return args[:outputs], args[outputs:first], args[first:-1], args[-1]

    def keep(self, ctx: Any, args: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        """Leave the backward what it is given."""
        ctx.set_materialize_grads(False)
        tensors = args[: self.tensors]
        if not self.all_kept:
            tensors = [x if kept else None for x, kept in zip(tensors, self.kept, strict=True)]
        ctx.save_for_backward(*[outputs[i] for i in self.rules.saved], *tensors)
        ctx.numbers = args[self.tensors : len(self.names)]

    def set_up(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """What autograd is told after a forward of the operator."""
        outputs = (output,) if isinstance(output, Tensor) else output
        ctx.mark_non_differentiable(*outputs[self.rules.outputs :])
        self.keep(ctx, inputs, outputs)

    def differentiate(self, ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Gradients by every argument from those by every output."""
        out: list[Any] = [None] * len(self.names)
        gradients, needed = gradients[: self.rules.outputs], ctx.needs_input_grad
        if all(d is None for d in gradients):
            return tuple(out)
        saved, count = ctx.saved_tensors, len(self.rules.saved)
        wanted = [needed[i] for i in self.places]
        for x, y in self.alike:
            wanted[self.places.index(y)] |= needed[x]
        found = self.run_backward(gradients, saved[:count], (*saved[count:], *ctx.numbers), wanted)
        for i, dx, want in zip(self.places, found, wanted, strict=True):
            out[i] = dx if want else None
        for x, y in self.alike:
            out[x] = out[y] if needed[x] else None
        return tuple(out)

    def run_backward(
        self, gradients: Gradients, saved: Sequence[Tensor], given: tuple[Any, ...],
        wanted: list[bool],
    ) -> Any:  # fmt: skip
        """The backward operator, or what it runs where nothing would see the operator."""
        if torch._C._are_functorch_transforms_active():
            return self.transformed_backward.apply(*gradients, *saved, *given, wanted)
        tensors = (*gradients, *saved, *given[: self.tensors])
        if torch.is_grad_enabled() or not are_plain_eager(tensors):
            return self.backward_operator(*gradients, *saved, *given, wanted)
        return self.gradients(gradients, saved, given, wanted)

    @property
    def message(self) -> str:
        """Which derivatives there are, and what to do for others."""
        return (
            "a registered operator has a first reverse-mode derivative only: for forward-mode or "
            f"second derivatives {self.rules.otherwise}"
        )

    def no_derivative(self, ctx: Any, *_: Any) -> None:
        """The derivative of the backward operator."""
        raise NotImplementedError(self.message)


class Backend(NamedTuple):
    """What runs a recurrence: forward, backward, and the shape of what the first saves."""

    # Inputs, and whether to save: outputs, final state, and what the backward is then spared.
    forward: Callable[[Any, bool], tuple[Tensor, Tensor, Tensor]]
    # Gradients by the outputs and the final state (None: zeros), inputs, and what was saved.
    backward: Callable[[Tensor, Tensor | None, Any, Tensor], Gradients]
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
        """Register it."""
        self.backend_of, self.differentiable = backend_of, differentiable
        gradients = tuple(get_type_hints(inputs))[:differentiable]
        rules = Rules(2, (2,), gradients, otherwise='use impl="reference"')
        super().__init__(
            name, inputs, lambda x, save, backend: self.backend_of(backend).forward(x, save),
            self.run_back, self.like, returned=3, rules=rules,
            options={"save": bool, "backend": str}, fold=fold,
        )  # fmt: skip

    def run_back(
        self, gradients: Gradients, saved: Sequence[Tensor], wanted: Sequence[bool], inputs: Any,
        save: bool, backend: str,
    ) -> Gradients:  # fmt: skip
        d_o, d_final = gradients
        d_o = inputs.v.new_zeros(inputs.output_shape) if d_o is None else d_o.contiguous()
        d_final = None if d_final is None else d_final.contiguous()
        return self.backend_of(backend).backward(d_o, d_final, inputs, saved[0])

    def like(self, inputs: Any, save: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
        """Shapes and types of what it returns."""
        saved_shape = self.backend_of(backend).saved_shape
        shape = saved_shape(inputs) if save else (0, *inputs.state_shape[1:])
        return (
            inputs.v.new_empty(inputs.output_shape),
            inputs.v.new_empty(inputs.state_shape, dtype=inputs.dtype),
            inputs.v.new_empty(shape, dtype=inputs.dtype),
        )

    def run(self, inputs: Inputs, backend: str, save_states: bool = True) -> RecurrentOutput:
        """Call it, saving only where that is asked for and a backward may follow."""
        save = save_states and differentiated(inputs[: self.differentiable])
        # The chunks of a folded batch lie in another order than those of its parts.
        save = save and not torch._C._are_functorch_transforms_active()
        return RecurrentOutput(*self(*inputs, save, backend))


def eager_function(operator: Operator[Any], name: str) -> Any:
    """Forward and backward of an operator without the operator around them.

    The last argument gives all outputs in another way than the forward, or None where it cannot.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        *args_, run = args
        outputs = None if run is None else run()
        if outputs is None:
            outputs = operator.run_forward(args_)
        operator.keep(ctx, args_, outputs)
        return operator.result(outputs)

    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return *operator.differentiate(ctx, *gradients), None

    rules = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), rules)


def differentiated(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a backward may follow a call with these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def is_dual(x: Tensor | None) -> bool:
    """Whether forward-mode differentiation follows x."""
    return x is not None and torch.autograd.forward_ad.unpack_dual(x).tangent is not None
