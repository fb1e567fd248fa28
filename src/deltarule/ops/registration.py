"""One registration for every operator: a named tuple of inputs, a forward and a backward.

    outputs = forward(inputs)        gradients = backward(Backward of gradients by the outputs)

The fields of the tuple give the schema. Registered are the operator and its backward operator, with
their fakes and their derivatives, so that torch.compile, export, modes and distributed wrappers see
one opaque node each; with a `Fold`, they have rules for vmap.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

from deltarule.ops.folding import Fold, Folding, transformed

Inputs = TypeVar("Inputs", bound=tuple[Any, ...])
# None: a gradient that is not wanted, or that does not exist.
Gradients = tuple[Tensor | None, ...]

SCHEMA = {
    Tensor: "Tensor", Tensor | None: "Tensor?", int: "SymInt", int | None: "SymInt?",
    float: "float", float | None: "float?", bool: "bool", str: "str", torch.dtype: "ScalarType",
}  # fmt: skip


class Backward(NamedTuple, Generic[Inputs]):
    """What a backward is given: gradients by the outputs, what was saved, which are wanted."""

    gradients: Gradients
    saved: Sequence[Tensor]
    wanted: Sequence[bool]
    inputs: Inputs
    # Nobody touches what was saved after this: gradients may lie there.
    spent: bool = False


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


class Registered(Generic[Inputs]):
    """An operator and its backward operator, as PyTorch's library knows them.

    Args:
        name: In the library "deltarule"; the backward operator is called `name`_backward.
        inputs: The named tuple of the arguments, tensors first.
        forward: (inputs, *options) -> every output, those that have a gradient first.
        backward: (`Backward`, *options) -> gradients by the inputs that `rules` names. None: there
            is none.
        fake: (inputs, *options) -> outputs that have shapes and types alone.
        returned: How many outputs there are.
        rules: What autograd has to know.
        options: Names and types of further arguments.
        fold: How vmap runs it. None: as it runs the forward's own operations.
    """

    # What a call does: see operators.py.
    run_forward: Callable[[Sequence[Any]], tuple[Tensor, ...]]
    gradients: Callable[..., Gradients]
    keep: Callable[..., None]
    differentiate: Callable[..., tuple[Any, ...]]

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
        self.name, self.inputs = name, inputs
        self.forward, self.backward, self.fake = forward, backward, fake
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
        register, none = torch.library.register_autograd, self.no_derivative
        register(f"deltarule::{name}", self.differentiate, setup_context=self.set_up)
        register(f"deltarule::{name_backward}", none)
        # Without a rule of its own, an operator is for vmap what its body does.
        forward, backward = self.body, self.backward_body
        if self.fold is not None:
            forward, backward = self.operator, self.backward_operator
            folding = Folding(self, self.fold)
            torch.library.register_vmap(f"deltarule::{name}", folding.vmap)
            torch.library.register_vmap(f"deltarule::{name_backward}", folding.vmap_backward)
        self.transformed = transformed(forward, self.set_up, self.differentiate, none)
        # There is no second derivative to save for.
        self.transformed_backward = transformed(backward, lambda *_: None, none, none)

    def body(self, *args: Any) -> Any:
        outputs = self.run_forward(args)
        return outputs[0] if self.returned == 1 else outputs

    def fake_body(self, *args: Any) -> Any:
        outputs = self.fake(self.inputs(*args[: self.fields]), *args[self.fields :])
        return outputs[0] if self.returned == 1 else outputs

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
        outputs = self.rules.outputs
        first = outputs + len(self.rules.saved)
        return args[:outputs], args[outputs:first], args[first:-1], args[-1]

    def set_up(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """What autograd is told after a forward of the operator."""
        outputs = (output,) if isinstance(output, Tensor) else output
        ctx.mark_non_differentiable(*outputs[self.rules.outputs :])
        self.keep(ctx, inputs, outputs)

    @property
    def message(self) -> str:
        return (
            "a registered operator has a first reverse-mode derivative only: for forward-mode or "
            f"second derivatives {self.rules.otherwise}; a layer takes no impl: use differences of "
            "its outputs or gradients in float64"
        )

    def no_derivative(self, ctx: Any, *_: Any) -> None:
        raise NotImplementedError(self.message)
