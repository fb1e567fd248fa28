"""Triton's interpreter without repeated work, which is three quarters of its time."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from triton.language import core
from triton.runtime import interpreter


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
