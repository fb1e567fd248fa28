"""Registered operators whose Triton kernels are imported where they run: Triton is an extra."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from deltarule.ops.operators import Operator
from deltarule.ops.registration import Rules


def kernel_operator(
    name: str, inputs: type[Any], module: str, fake: Callable[[Any], Any], rules: Rules,
    returned: int = 1,
) -> Operator[Any]:  # fmt: skip
    """The operator of two functions of a module of this package, `name` and `name`_backward.

    They take the inputs, and what `Registered` gives a backward; see there for the rest.
    """

    @cache
    def kernels() -> Any:
        return import_module(f"{__package__}.{module}")

    def forward(given: Any) -> Any:
        return getattr(kernels(), name)(given)

    def backward(*given: Any) -> Any:
        return getattr(kernels(), f"{name}_backward")(*given)

    return Operator(name, inputs, forward, backward, fake, returned=returned, rules=rules)
