"""Triton's interpreter, made to refuse every address outside the tensors that a kernel was given.

It reads and writes whatever memory an address points to, so that a wrong mask goes unseen as long
as that memory belongs to the process. Repeated work, three quarters of its time, is left out.
"""

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from triton.language import core
from triton.runtime import interpreter


class Ranges:
    """From where to where in memory the arguments of the kernel at work lie."""

    def __init__(self) -> None:
        self.kernel = "no kernel"
        self.starts: list[int] = []
        self.reach = [0]

    def given(self, kernel: str, arguments: list[Any]) -> None:
        """Take the tensors, and those behind descriptors."""
        tensors = [getattr(x, "base", x) for x in arguments]
        found = sorted(place(x) for x in tensors if isinstance(x, torch.Tensor))
        self.kernel = kernel
        self.starts = [start for start, _ in found]
        # How far those among the first 0, 1, 2 ... reach that reach farthest.
        self.reach = [0, *accumulate((end for _, end in found), max)]

    def check(self, addresses: Any, mask: Any, does: str) -> None:
        """Raise where an address that is not masked lies outside all of them."""
        size = addresses.get_element_ty().primitive_bitwidth // 8
        chosen = np.broadcast_to(np.asarray(mask.data, bool), addresses.data.shape)
        asked = addresses.data if chosen.all() else addresses.data[chosen]
        # Nearly always all of them lie in one tensor.
        if not asked.size or self.reaches(int(asked.min()), int(asked.max()) + size):
            return
        asked = asked.astype(np.uint64)
        before = np.searchsorted(np.array(self.starts, np.uint64), asked, side="right")
        inside = asked + np.uint64(size) <= np.array(self.reach, np.uint64)[before]
        if not inside.all():
            raise IndexError(f"{self.kernel} {does} outside its arguments, {(~inside).sum()} times")

    def reaches(self, first: int, end: int) -> bool:
        """Whether one of them holds all from the first byte to the one before the end."""
        return end <= self.reach[bisect_right(self.starts, first)]


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
        quicken(patch)
        patch.setattr(executor, "_init_args_hst", given)
        patch.setattr(builder, "create_masked_load", loaded)
        patch.setattr(builder, "create_masked_store", stored)
        yield


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Leave out what ends as it began: no value and no error depends on it."""
    builder = interpreter.interpreter_builder
    # It looks for overflows of integers and, without `debug`, drops what it found.
    unchecked = dataclasses.replace(builder.options, sanitize_overflow=False)
    patch.setattr(builder, "options", unchecked)
    change_language_once(patch)
    remember_types(patch)
    share_attributes(patch)


def change_language_once(patch: pytest.MonkeyPatch) -> None:
    """In each launch, not in each call of a function within its kernel."""
    change, call = interpreter._patch_lang, interpreter.GridExecutor.__call__
    changed: set[int] = set()

    def launch(self: Any, *arguments: Any, **named: Any) -> None:
        changed.clear()
        call(self, *arguments, **named)

    def change_unless_done(function: Any) -> Any:
        # What it changes depends on a function's module only.
        module = id(function.__globals__)
        if module in changed:
            return interpreter._LangPatchScope()
        changed.add(module)
        return change(function)

    patch.setattr(interpreter.GridExecutor, "__call__", launch)
    patch.setattr(interpreter, "_patch_lang", change_unless_done)


def remember_types(patch: pytest.MonkeyPatch) -> None:
    """numpy's, by name: they are looked up in a dictionary that is made anew each time."""
    find = interpreter._get_np_dtype
    known: dict[str, np.dtype] = {}

    def numpy_type(of: core.dtype) -> np.dtype:
        if of.name not in known:
            known[of.name] = find(of)
        return known[of.name]

    patch.setattr(interpreter, "_get_np_dtype", numpy_type)


def share_attributes(patch: pytest.MonkeyPatch) -> None:
    """Those that tensors of one type, and types of one shape, have in common."""
    make_tensor, make_block = core.tensor.__init__, core.block_type.__init__
    tensors: dict[str, dict[str, Any]] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}

    def tensor(self: Any, handle: Any, type: core.dtype) -> None:
        if type.name in tensors:
            vars(self).update(tensors[type.name], handle=handle, type=type)
        else:
            make_tensor(self, handle, type)
            tensors[type.name] = dict(vars(self), handle=None)

    def block(self: Any, element_ty: core.dtype, shape: Any) -> None:
        key = element_ty.name, *[getattr(size, "value", size) for size in shape]
        if key in blocks:
            vars(self).update(blocks[key])
        else:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))

    patch.setattr(core.tensor, "__init__", tensor)
    patch.setattr(core.block_type, "__init__", block)
