"""`torch.library.opcheck` of every registered operator that a call goes through."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class Registered(TorchDispatchMode):
    """Operators of this package that pass by, with their arguments as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "deltarule":
            kept = tree_map_only(Tensor, lambda x: x.detach().clone(), args)
            self.calls.append((func, kept))
        return func(*args, **(kwargs or {}))


def with_gradient(x: Tensor) -> Tensor:
    return x.requires_grad_(x.is_floating_point())


ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def opcheck_all(run: Callable[[], object], tests: tuple[str, ...] = ALL) -> list[str]:
    """Check what `run` calls, forward and backward; the names of the operators."""
    with Registered() as seen:
        run()
    for operator, arguments in seen.calls:
        if not (operator._schema.is_mutable or operator._opname.endswith("_backward")):
            tree_map_only(Tensor, with_gradient, arguments)
        found = opcheck(operator, arguments, test_utils=tests)
        assert set(found.values()) == {"SUCCESS"}, operator
    assert seen.calls
    return [operator._opname for operator, _ in seen.calls]
