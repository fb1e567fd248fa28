"""Launches that skip Triton's search for a compiled kernel, most of what a launch costs the host.

A first launch goes through Triton, and leaves its binary under a key that tells apart all that
Triton tells apart: the types of the arguments, whole numbers, tiles, and the GPU. A further one of
the same key goes to Triton's own launcher at once. Anything unusual (hooks, debugging, an address
off the grid of 16 bytes, the interpreter, an interface that this file does not know) leaves the
launch to Triton, because a wrong binary would silently give wrong numbers.
"""

import copy
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import Context, ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter
from triton import AsyncCompileMode, knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from deltarule.ops.dispatch import compiled
from deltarule.ops.runtime.tensor_maps import Fetched, Tiles, described, launcher_of_maps, with_maps

# Written out, because Triton's default follows an environment variable.
OPTIONS = {"enable_fp_fusion": True}
# What a launch may choose besides a kernel's constants.
CHOICES = (*OPTIONS, "num_warps", "num_stages", "maxnreg", "launch_pdl", "launch_cooperative_grid")
# Bytes: Triton compiles for addresses on this grid and for any others apart.
ALIGNED = 16
# Keys of one kernel that are kept: lengths never end.
MOST = 1024
# More would only wait for each other: much of Triton's compiler is Python.
MOST_THREADS = 16
# Where the current device is the right one, there is nothing to change.
HERE = nullcontext()
# What `parameters` found, with the kernel, so that its id stays its own.
_parameters: dict[int, tuple[tuple[str, ...], frozenset[str], Any]] = {}

# Whether launches compile their kernels and run nothing.
ONLY_COMPILED: ContextVar[bool] = ContextVar("ONLY_COMPILED", default=False)
# What writes launches down, a `Tape` of replay.py.
TAPE: ContextVar[Any] = ContextVar("TAPE", default=None)

Grid = tuple[int, int, int]


class Binary(NamedTuple):
    """A compiled kernel on one GPU, ready for its launcher."""

    launcher: Callable[..., None]
    # The code's handle, and what goes with it in a launch without hooks.
    function: tuple[Any, ...]
    # Keeps the code on the GPU.
    compiled: CompiledKernel
    fetched: tuple[Fetched, ...]


class Launch:
    """A kernel with all that it is compiled for, to be called with a grid and the rest.

    `constants` has every argument that does not change from call to call, numbers or named tuples
    of some, `tiles` those that the copy engine fetches; a call gives the others, in the kernel's
    order.
    """

    def __init__(
        self, kernel: Any, constants: Mapping[str, Any], tiles: Tiles | None = None
    ) -> None:
        # Triton's compiler takes the parts as constants of its own, its interpreter as numbers.
        if isinstance(kernel, JITFunction):
            constants = {
                name: type(x)(*map(tl.constexpr, x)) if isinstance(x, tuple) else x
                for name, x in constants.items()
            }
        self.kernel, self.constants = kernel, {**OPTIONS, **constants}
        names, tiles = list(kernel.arg_names), tiles or {}
        self.tiles = sorted((names.index(name), *of) for name, of in tiles.items())
        # What follows the arguments of a call; a launcher passes over what is compiled in.
        self.known = [name for name in names if name in self.constants]
        self.rest = [self.constants[name] for name in self.known]
        self.binaries: dict[tuple[object, ...], Binary] = {}

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        """Run the kernel where its tensors are, on the current stream there."""
        with there(next(x.device for x in arguments if isinstance(x, Tensor))):
            binary = self.launch(grid, arguments)
        if (tape := TAPE.get()) is not None:
            tape.note(self, binary, grid, arguments)

    def launch(self, grid: Grid, arguments: tuple[Any, ...]) -> Binary | None:
        if ONLY_COMPILED.get():
            self.kernel.warmup(*self.given(arguments), grid=grid, **self.constants)
            return None
        found = None if watched(self.kernel) else signature(arguments)
        if found is not None and self.binaries:
            key, values = found
            active = driver.active
            device = active.get_current_device()
            if (binary := self.binaries.get((device, *key))) is not None:
                if binary.fetched:
                    values = with_maps(binary.fetched, arguments, values)
                stream = active.get_current_stream(device)
                binary.launcher(*grid, stream, *binary.function, *values, *self.rest)
                return binary
        compiled = self.through_triton(grid, arguments)
        if found is None or not isinstance(compiled, CompiledKernel):
            return None
        return self.keep(found[0], compiled, arguments)

    def through_triton(self, grid: Grid, arguments: tuple[Any, ...]) -> object:
        return self.kernel[grid](*self.given(arguments), **self.constants)

    def given(self, arguments: tuple[Any, ...]) -> list[Any]:
        given = list(arguments)
        for place, width, tile in self.tiles:
            if (x := given[place]) is not None:
                given[place] = described(x, width, tile)
        return given

    def keep(
        self, key: tuple[object, ...], compiled: CompiledKernel, arguments: tuple[Any, ...]
    ) -> Binary | None:
        """Remember the binary of a launch, unless its launcher is not as it was known."""
        given = [tile for tile in self.tiles if arguments[tile[0]] is not None]
        metadata = list(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        launcher = launcher_of_maps(compiled.run) if given else compiled.run
        complete = list(self.kernel.arg_names[len(arguments) :]) == self.known
        if not complete or launcher is None or len(metadata) != len(given) or None in metadata:
            return None
        if len(self.binaries) >= MOST:
            self.binaries.clear()
        fetched = tuple(Fetched(*tile, of, {}) for tile, of in zip(given, metadata, strict=True))
        own = compiled.function, compiled.packed_metadata, None, None, None
        launcher, function = unwrapped(launcher, own)
        binary = Binary(launcher, function, compiled, fetched)
        self.binaries[driver.active.get_current_device(), *key] = binary
        return binary


def parameters(kernel: Any, sizes: Sequence[str] = ()) -> tuple[tuple[str, ...], frozenset[str]]:
    """What a kernel is given in every launch, in order; and its constants and choices.

    `sizes` are the fields of a constant S, which stand for it.
    """
    # A kernel's own hash is that of its source.
    if (found := _parameters.get(id(kernel))) is None:
        names, types = list(kernel.arg_names), kernel.fn.__annotations__
        first = next((i for i, name in enumerate(names) if name in types), len(names))
        known = [*names[first:], *CHOICES, *(sizes if "S" in names else ())]
        found = _parameters[id(kernel)] = tuple(names[:first]), frozenset(known), kernel
    return found[:2]


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def there(place: torch.device) -> AbstractContextManager[Any]:
    """Make a device current inside: launches go to the current one, wherever their tensors are."""
    return HERE if is_here(place) else torch.cuda.device(place)


def is_here(place: torch.device) -> bool:
    return place.type != "cuda" or place.index == torch.cuda.current_device()


def watched(*kernels: Any) -> bool:
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        # A chain of functions, or one, or None.
        if getattr(hook, "calls", hook):
            return True
    if runtime.debug or getattr(runtime, "add_stages_inspection_hook", None):
        return True
    for kernel in kernels:
        if getattr(kernel, "pre_run_hooks", None):
            return True
    return bool(knobs.compilation.instrumentation_mode)


def signature(arguments: tuple[Any, ...]) -> tuple[tuple[object, ...], list[Any]] | None:
    """A key of types and whole numbers, and the values for a launcher; None for an unusual call."""
    key: list[object] = []
    values: list[Any] = []
    addresses, device = 0, None
    for x in arguments:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            # Triton asks whether a GPU knows the address of a tensor, and takes a number as it is.
            if (place := x.get_device()) != device and device is not None:
                return None
            address, device = x.data_ptr(), place
            addresses |= address
            key.append(x.dtype)
            values.append(address)
        elif kind is int or x is None:
            # Whole: Triton tells 1, multiples of 16 and what 32 bits hold from the others.
            key.append(x)
            values.append(x)
        elif kind is float:
            # Not the number itself, for 1.0 == 1.
            key.append(float)
            values.append(x)
        else:
            return None
    return None if addresses % ALIGNED else (tuple(key), values)


def unwrapped(
    launcher: Any, function: tuple[Any, ...]
) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What a launcher calls in the end, and what that is given in place of `function`.

    A launcher adds what a kernel was compiled for and, where the kernel needs it, scratch memory.
    It stays as it is where there is such memory, or where it has another form.
    """
    sizes = [getattr(launcher, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if sizes != [0, 0]:
        return launcher, function
    seen: list[tuple[Any, ...]] = []
    bare, first = copy.copy(launcher), ("grid", "grid", "grid", "stream")
    bare.launch = lambda *given: seen.append(given)
    bare(*first, *function)
    run, (*given, last) = launcher.launch, seen[0]
    # Triton 3.7 hands on the kernel's arguments as one: here there are none.
    together, count = last == (), len(given)
    given = given if together else [*given, last]
    if (*given[:4],) != first:
        return launcher, function
    if together:
        return lambda *given: run(*given[:count], given[count:]), tuple(given[4:])
    return run, tuple(given[4:])


def compiled_together(run: Callable[[], object], kind: Hashable) -> None:
    """Compile all that `run` launches, before the first such call; it must not read any values.

    Such a call goes through its launches twice: first they only hand their kernels to threads that
    compile them, then they run.
    """
    # Memory that a captured graph takes stays taken.
    if kind in compiled or torch.cuda.is_current_stream_capturing():
        return
    compiled.add(kind)
    # What is set inside, or left set by a kernel that does not compile, ends with the context.
    Context().run(side_by_side, run)


def side_by_side(run: Callable[[], object]) -> None:
    """Go through launches that compile in threads.

    Errors are left to the real launch, if it comes: a backward may run out of memory before it.
    """
    ONLY_COMPILED.set(True)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS)) as pool:
        with AsyncCompileMode(pool, ignore_errors=True) as mode, suppress(Exception):
            run()
        kernels = [future.kernel for future in mode.future_kernels.values()]
        # Triton's cache shall hold what launches a kernel: before 3.7 a C function of its own.
        made = [x for x in kernels if x is not None]
        pool.map(lambda x: driver.active.launcher_cls(x.src, x.metadata), made)
