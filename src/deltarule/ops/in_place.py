"""Operators that write into tensors of their call: past the operator where nothing watches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, get_type_hints

import torch

from deltarule.ops.dispatch import NUMBERS, PLAIN, is_plain_eager
from deltarule.ops.registration import SCHEMA

# Types of what a call is given where nothing needs the operator.
KNOWN = PLAIN | NUMBERS

Call = TypeVar("Call", bound=tuple[Any, ...])


class InPlace(Generic[Call]):
    """A registered operator of calls whose fields are tensors, numbers, or named tuples of those.

    Args:
        name: In the library "deltarule".
        call: The named tuple of its calls.
        backends: What runs a call, by name; an argument of the operator.
        written: The fields that are written, unless they are None.
        fake: From a call to an output that has shape and type alone. None: nothing is returned.
    """

    def __init__(
        self,
        name: str,
        call: type[Call],
        backends: Mapping[str, Callable[[Call], Any]],
        written: Sequence[str],
        fake: Callable[[Call], Any] | None = None,
    ) -> None:
        self.call, self.backends, self.written = call, backends, written
        self.fields = get_type_hints(call)
        letters = {x: f"(a{i}!)" for i, x in enumerate(written)}
        arguments = []
        for field, hint in self.fields.items():
            parts = get_type_hints(hint) if hasattr(hint, "_fields") else {field: hint}
            for x, part in parts.items():
                kind = SCHEMA[part].replace("Tensor", "Tensor" + letters.get(x, ""))
                arguments.append(f"{kind} {x}")

        def body(*given: Any) -> Any:
            call, backend = self.of(given)
            return backends[backend](call)

        # No defaults: PyTorch 2.11 leaves out trailing arguments that equal theirs, and then looks
        # for the tensors that it must mark as written.
        schema = f"({', '.join(arguments)}, str backend) -> {'Tensor' if fake else '()'}"
        made = torch.library.custom_op(
            f"deltarule::{name}", body, mutates_args=tuple(written), schema=schema
        )
        if fake is not None:
            made.register_fake(lambda *given: fake(self.of(given)[0]))
        self.operator: Any = made

    def of(self, given: Sequence[Any]) -> tuple[Call, str]:
        """A call of its numbers and tensors one by one, and the backend's name after them."""
        *rest, backend = given
        fields = []
        for hint in self.fields.values():
            count = len(getattr(hint, "_fields", ()))
            fields.append(hint(*rest[:count]) if count else rest[0])
            rest = rest[count or 1 :]
        return self.call(*fields), backend

    def __call__(self, call: Call, backend: str) -> Any:
        """Run a call by a backend; there is no gradient."""
        given: list[Any] = []
        for x in call:
            # PyTorch 2.11's compiler adds no named tuple to a list.
            given.extend(x if isinstance(x, tuple) else (x,))
        if not is_plain_eager() or not KNOWN.issuperset(map(type, given)):
            return self.operator(*given, backend)
        found = self.backends[backend](call)
        # A kernel's write goes past autograd, which must not use what it saved before.
        for name in self.written:
            if (x := getattr(call, name)) is not None:
                torch.autograd.graph.increment_version(x)
        return found
