"""Triton's interpreter, made to refuse every address outside the tensors that a kernel was given.

It reads and writes whatever memory an address points to, so that a wrong mask goes unseen as long
as that memory belongs to the process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter


class Ranges:
    """From where to where in memory the arguments of the kernel at work lie."""

    def __init__(self) -> None:
        self.kernel = "no kernel"
        self.starts = self.ends = np.zeros(0, np.uint64)

    def given(self, kernel: str, arguments: list[Any]) -> None:
        """Take the tensors, and those behind descriptors."""
        tensors = [getattr(x, "base", x) for x in arguments]
        found = sorted(place(x) for x in tensors if isinstance(x, torch.Tensor))
        self.kernel = kernel
        self.starts, self.ends = np.array(found, np.uint64).reshape(-1, 2).T

    def check(self, addresses: Any, mask: Any, does: str) -> None:
        """Raise where an address that is not masked lies outside all of them."""
        size = np.uint64(addresses.get_element_ty().primitive_bitwidth // 8)
        chosen = np.broadcast_to(np.asarray(mask.data, bool), addresses.data.shape)
        asked = addresses.data[chosen].astype(np.uint64)
        before = np.searchsorted(self.starts, asked, side="right")
        inside = before > 0
        inside &= asked + size <= np.append(np.uint64(0), np.maximum.accumulate(self.ends))[before]
        if not inside.all():
            raise IndexError(f"{self.kernel} {does} outside its arguments, {(~inside).sum()} times")


def place(x: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the one after the last."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size() * bool(x.numel())


@contextmanager
def checked_addresses() -> Iterator[None]:
    """Every load and store of an interpreted kernel is checked inside."""
    ranges, executor = Ranges(), interpreter.GridExecutor
    builder = interpreter.InterpreterBuilder
    on_host, load, store = (
        executor._init_args_hst,
        builder.create_masked_load,
        builder.create_masked_store,
    )

    def given(self: Any, arguments: Any, named: Any) -> Any:
        found = on_host(self, arguments, named)
        ranges.given(self.fn.__name__, [*found[0], *found[1].values()])
        return found

    def loaded(self: Any, addresses: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        ranges.check(addresses, mask, "reads")
        return load(self, addresses, mask, *rest, **options)

    def stored(self: Any, addresses: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        ranges.check(addresses, mask, "writes")
        return store(self, addresses, value, mask, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_init_args_hst", given)
        patch.setattr(builder, "create_masked_load", loaded)
        patch.setattr(builder, "create_masked_store", stored)
        yield
