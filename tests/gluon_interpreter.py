"""Run a warp-specialised Gluon kernel on the CPU: its roles as threads, its barriers as they count.

The kernel's own functions are executed with another `gl`, whose tensors are PyTorch's and whose
layouts are nothing. One role runs at a time, and a random choice says which goes on at every
barrier and every touch of shared memory, copies of the copy engine included; so an order of events
that a GPU might take once in a million runs is met here in a few. A role that waits for ever, a
barrier whose phase comes round before a role has seen it, a tile that is overwritten while a
product reads it, a product that reads what no fence has made visible, a read of what was never
written (NaN), an address outside a tensor: each fails.
"""

import operator
import random
import threading
from collections.abc import Callable
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from deltarule.ops.runtime.gluon_tiles import FusedLaunch
from deltarule.ops.runtime.tensor_maps import FAR

TYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int32": torch.int32, "int64": torch.int64,
}  # fmt: skip
PATIENCE = 60.0
# Of Triton's language, too, which Triton's own interpreter may have taken.
FUNCTIONS = JITFunction, InterpretedFunction


class Value:
    """A tensor of the kernel: arithmetic makes a new one, and nothing changes it."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Value":
        return Value(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def __getitem__(self, at: Any) -> "Value":
        return Value(self.data[at])

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)


def plain(x: Any) -> Any:
    """The PyTorch tensor, or the number."""
    return x.data if isinstance(x, Value) else x


def mirrored(of: Callable[..., Any]) -> Callable[..., Any]:
    """The operator with its arguments the other way round."""
    return lambda x, y: of(y, x)


def of_values(of: Callable[..., Any]) -> Callable[..., Any]:
    """An operator on numbers and tensors; a number and an address come to an address."""
    return lambda x, y: y + x if isinstance(y, Pointer) else Value(of(plain(x), plain(y)))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "rshift", "and_", "xor"):
    _of = of_values(getattr(operator, _name))
    setattr(Value, f"__{_name.strip('_')}__", _of)
    setattr(Value, f"__r{_name.strip('_')}__", mirrored(_of))
for _name in ("lt", "le", "gt", "ge", "eq"):
    setattr(Value, f"__{_name}__", of_values(getattr(operator, _name)))
Value.__neg__ = lambda x: Value(-x.data)


class Pointer:
    """Addresses in a tensor, counted in its elements."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, plain(self.offset) + plain(more))

    def at(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Places and whether they are touched; these lie inside."""
        offset = torch.as_tensor(self.offset)
        mask = torch.as_tensor(True if mask is None else plain(mask))
        offset, mask = torch.broadcast_tensors(offset, mask)
        touched = offset[mask]
        assert ((touched >= 0) & (touched < self.memory.numel())).all(), "an address outside"
        return offset, mask

    def load(self, mask: Any = None, other: Any = 0.0) -> Tensor:
        offset, mask = self.at(mask)
        found = self.memory.flatten()[offset.clamp(0, self.memory.numel() - 1)]
        return torch.where(mask, found, torch.as_tensor(other, dtype=found.dtype))

    def store(self, x: Tensor, mask: Any = None) -> None:
        offset, mask = self.at(mask)
        x = torch.as_tensor(x).expand(offset.shape).to(self.memory.dtype)
        self.memory.view(-1)[offset[mask]] = x[mask]


class Descriptor:
    """A matrix of which the copy engine moves tiles: whole ones, or with two more axes first rows.

    Of columns, and of channels of heads, it moves those that are there; of rows, too, where a
    kernel means it to.
    """

    def __init__(self, x: Tensor, width: Any, tile: list[int], cut: bool = False) -> None:
        self.cut = cut
        axes = [width] if isinstance(width, int) else [*width]
        self.matrix, self.block_shape, self.dtype = x.view(-1, *axes), tile, x.dtype
        self.tile, self.layout = tile[-1 - len(axes) :], None

    def window(self, at: list[Any]) -> Tensor:
        *ends, row = (int(x) for x in at[: 1 - len(self.tile)])
        columns = [int(x) for x in at[1 - len(self.tile) :]]
        height, *widths = self.tile
        assert len(at) == len(self.block_shape), "another number of axes"
        if ends:
            far, end = ends
            assert far == FAR
            rows = FAR - row
            assert 0 <= rows <= height, "more rows than a tile has"
            # Of no rows it does not matter which.
            row, height = end - rows if rows else 0, rows
        rows = self.matrix.shape[0]
        assert row + height <= rows or (self.cut and row < rows), "rows outside"
        found = self.matrix[row : row + height]
        for axis, (column, width) in enumerate(zip(columns, widths, strict=True), 1):
            size = found.shape[axis]
            assert 0 <= column < size, "columns outside"
            found = found.narrow(axis, column, min(width, size - column))
        return found


def part_of(tile: Tensor, window: Tensor) -> Tensor:
    """The part of a tile that is there."""
    return tile[tuple(slice(size) for size in window.shape)]


class Memory:
    """A tile in shared memory; `unseen` marks what products and copies cannot see yet."""

    def __init__(self, machine: "Machine", data: Tensor, unseen: Tensor) -> None:
        self.machine, self.data, self.unseen, self.layout = machine, data, unseen, None

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def viewed(self, change: Callable[[Tensor], Tensor]) -> "Memory":
        return Memory(self.machine, change(self.data), change(self.unseen))

    def index(self, i: Any) -> "Memory":
        return self.viewed(lambda x: x[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> "Memory":
        return self.viewed(lambda x: x.narrow(dim, int(start), int(length)))

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def permute(self, order: tuple[int, ...]) -> "Memory":
        return self.viewed(lambda x: x.permute(order))

    def reshape(self, shape: list[int]) -> "Memory":
        return self.viewed(lambda x: x.view(shape))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Memory":
        count = torch.Size(shape).numel()
        data = self.data.view(-1).view(dtype)[:count].view(shape)
        # Two numbers of two bytes to one of four, which no product reads.
        unseen = self.unseen.view(-1)[:count].view(shape)
        return Memory(self.machine, data, unseen)

    def load(self, layout: Any = None) -> Value:
        self.machine.step()
        return Value(self.data.clone())

    def store(self, x: Value) -> None:
        self.machine.step()
        self.data.copy_(x.data)
        self.unseen.fill_(self.machine.role())

    def read(self) -> Tensor:
        """As products and copies read."""
        assert not self.unseen.any(), "read before a fence"
        return self.data.float() if self.data.is_floating_point() else self.data


class Barrier:
    """Arrivals and bytes that are still to come in this phase, and the phases that are over."""

    def __init__(self, count: int) -> None:
        self.count, self.arrivals, self.bytes, self.over = count, count, 0, 0
        self.seen: dict[int, int] = {}

    def arrive(self, bytes_expected: int = 0) -> None:
        assert self.arrivals > 0, "more arrivals than the barrier counts"
        self.arrivals -= 1
        self.bytes += bytes_expected
        self.turn()

    def arrived(self, size: int) -> None:
        self.bytes -= size
        self.turn()

    def turn(self) -> None:
        if self.arrivals == 0 and self.bytes == 0:
            self.over, self.arrivals = self.over + 1, self.count

    def is_over(self, phase: int) -> bool:
        assert self.count, "waited for before it is made"
        return (self.over & 1) != phase

    def passed(self, role: int, phase: int) -> None:
        """A role's waits see one phase after the other: the first if it begins with phase 0."""
        expected = self.seen.get(role, 1 - phase)
        assert self.over == expected, f"phase {self.over} taken for {expected}"
        self.seen[role] = expected + 1


class Product(Value):
    """A product in flight: at its wait its operands must be what they were."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self.compute, self.result = compute, compute()

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        raise AssertionError("used before a wait")

    def finish(self) -> None:
        again = self.compute()
        assert torch.equal(again.nan_to_num(), self.result.nan_to_num()), "overwritten in flight"


class TensorMemory:
    """A place in tensor memory; while a product in flight adds to it, nobody looks at it."""

    def __init__(self, machine: "Machine", dtype: torch.dtype, shape: list[int]) -> None:
        self.machine = machine
        self.data = torch.full([int(x) for x in shape], torch.nan, dtype=dtype)
        # Products in flight that read it, and that add to it.
        self.readers = self.writers = 0

    def load(self, layout: Any) -> Value:
        self.machine.step()
        assert not self.writers, "used before a wait"
        return Value(self.data.clone())

    def store(self, x: Value) -> None:
        self.machine.step()
        assert self.readers + self.writers == 0, "overwritten in flight"
        assert x.dtype == self.data.dtype, "another type"
        self.data.copy_(x.data)

    def read(self) -> Tensor:
        return self.data.float()


class Machine:
    """One program: its roles, and whose turn it is."""

    def __init__(self, program: int, seed: int, programs: int = 1) -> None:
        self.program, self.programs, self.random = program, programs, random.Random(seed)
        self.turn = threading.Condition()
        self.local = threading.local()
        self.current, self.failure = 0, None
        self.waiting: dict[int, Callable[[], bool]] = {}
        # Role (0: into shared memory), number among the role's, and what is done.
        self.copies: list[tuple[int, int, Callable[[], None]]] = []
        self.sent: dict[int, int] = {}
        # Products on sm_100 and what is told of them: those of a role one after the other.
        self.queues: dict[int, list[Callable[[], None]]] = {}
        self.told: set[Barrier] = set()
        self.tiles: list[Tensor] = []
        self.favour: list[float] = []
        self.haste = 0.3

    # -- turns

    def role(self) -> int:
        """Of this thread, from 1 on: what tiles are marked with."""
        return getattr(self.local, "role", 0) + 1

    def step(self, ready: Callable[[], bool] | None = None) -> None:
        """Let another role, or a copy, go first, or many; then go on once `ready`."""
        if not hasattr(self.local, "role"):
            return
        me = self.local.role
        with self.turn:
            self.waiting[me] = ready or (lambda: True)
            self.choose()
            self.turn.wait_for(lambda: self.current == me or self.failure, PATIENCE)
            if self.failure or self.current != me:
                raise RuntimeError(self.failure or "nobody's turn")

    def choose(self) -> None:
        """The next role, after some copies: mostly the one that is favoured for a while.

        So each role is now and then as far ahead of the others, and as far behind, as it can be.
        """
        if self.random.random() < 0.03:
            self.favour = [self.random.random() for _ in self.favour]
            self.haste = self.random.choice((0.02, 0.3, 0.9))
        while True:
            ready = [role for role, is_ready in self.waiting.items() if is_ready()]
            if self.under_way() and (not ready or self.random.random() < self.haste):
                self.go_on(self.random.randrange(self.under_way()))
                continue
            if ready or not self.waiting:
                break
            self.failure = self.failure or f"deadlock: roles {sorted(self.waiting)} wait"
            self.turn.notify_all()
            return
        if ready:
            favoured = max(ready, key=self.favour.__getitem__)
            self.current = favoured if self.random.random() < 0.9 else self.random.choice(ready)
            del self.waiting[self.current]
        self.turn.notify_all()

    def under_way(self) -> int:
        """Of how much one may come next: of every copy, and of every role's first product."""
        return len(self.copies) + len(self.queues)

    def go_on(self, i: int) -> None:
        """Copies of one role finish in any order, products do not."""
        if i < len(self.copies):
            self.copies.pop(i)[2]()
        else:
            role = list(self.queues)[i - len(self.copies)]
            first = self.queues[role].pop(0)
            if not self.queues[role]:
                del self.queues[role]
            first()

    def specialize(self, roles: list[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
        """Run the roles to their ends."""

        # Said to every thread anew.
        @torch.no_grad()
        def run(number: int, role: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            self.local.role = number
            # A role's own queues of products.
            self.local.products = []
            try:
                with self.turn:
                    self.turn.wait_for(lambda: self.current == number or self.failure, PATIENCE)
                if not self.failure:
                    role(*arguments)
                    self.store_wait(0)
            except BaseException as error:
                self.failure = self.failure or error
            with self.turn:
                self.choose()

        self.waiting = {i: lambda: True for i in range(len(roles))}
        self.favour = [self.random.random() for _ in roles]
        threads = [
            threading.Thread(target=run, args=(i, *role), daemon=True)
            for i, role in enumerate(roles)
        ]
        self.current = -1
        for thread in threads:
            thread.start()
        with self.turn:
            self.choose()
        for thread in threads:
            thread.join(PATIENCE)
        if self.failure:
            raise AssertionError(str(self.failure)) from (
                self.failure if isinstance(self.failure, BaseException) else None
            )

    # -- shared memory and barriers

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if dtype == torch.int64:
            return Barriers(Barrier(0) for _ in range(shape[0]))
        shape = [int(x) for x in shape]
        data = torch.full(shape, torch.nan, dtype=dtype)
        unseen = torch.zeros(shape, dtype=torch.int8)
        self.tiles.append(unseen)
        return Memory(self, data, unseen)

    def fence(self) -> None:
        """Products and copies see what this role has written."""
        for unseen in self.tiles:
            unseen[unseen == self.role()] = 0

    def wait(self, barrier: Barrier, phase: Any) -> None:
        phase = int(phase)
        self.step(lambda: barrier.is_over(phase))
        barrier.passed(self.role(), phase)

    def arrive(self, barrier: Barrier) -> None:
        self.step()
        barrier.arrive()

    def expect(self, barrier: Barrier, size: int) -> None:
        self.step()
        barrier.arrive(size)

    # -- the copy engine

    def copy_in(self, of: Descriptor, at: list[Any], barrier: Barrier, tile: Memory) -> None:
        window = of.window(at)

        def copy() -> None:
            tile.data.zero_()
            part_of(tile.data.view(of.tile), window).copy_(window)
            barrier.arrived(tile.data.numel() * tile.data.element_size())

        self.copies.append((0, 0, copy))

    def copy_out(self, of: Descriptor, at: list[Any], tile: Memory) -> None:
        window = of.window(at)
        number = self.sent[self.role()] = self.sent.get(self.role(), 0) + 1

        def copy() -> None:
            window.copy_(part_of(tile.read().reshape(of.tile), window))

        self.copies.append((self.role(), number, copy))

    def store_wait(self, left: int) -> None:
        """Until none but so many of this role's last copies are in flight."""
        last = self.sent.get(self.role(), 0) - left
        for copy in [x for x in self.copies if x[0] == self.role() and x[1] <= last]:
            self.copies.remove(copy)
            copy[2]()

    # -- products

    def product(
        self, a: Any, b: Memory, total: Any, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        left = (lambda: a.read()) if isinstance(a, Memory) else (lambda: a.data.float())
        # Of a product in flight the sums go on.
        before = total.result if isinstance(total, Product) else total.data
        before = before if use_acc else torch.zeros_like(before)
        started = Product(lambda: before + left() @ b.read())
        self.local.products.append(started)
        self.step()
        return started

    def queued_product(self, a: Any, b: Memory, place: TensorMemory, use_acc: bool) -> None:
        """On sm_100: later; until then its operands must be what they are."""
        left, right = a.read(), b.read()
        if isinstance(a, TensorMemory):
            assert not a.writers, "used before a wait"
            a.readers += 1
        place.writers += 1

        def compute() -> None:
            same = torch.equal(a.read().nan_to_num(), left.nan_to_num())
            same = same and torch.equal(b.read().nan_to_num(), right.nan_to_num())
            assert same, "overwritten in flight"
            place.data.copy_((place.data if use_acc else 0.0) + left @ right)

        def done() -> None:
            place.writers -= 1
            if isinstance(a, TensorMemory):
                a.readers -= 1

        left, right = left.clone(), right.clone()
        queue = self.queues.setdefault(self.role(), [])
        queue.append(compute)
        self.local.products.append(done)
        self.step()

    def commit(self, barrier: Barrier) -> None:
        """On sm_100: an arrival once all products of the role so far are done."""
        finished, self.local.products = self.local.products, []

        def arrive() -> None:
            for done in finished:
                done()
            barrier.arrive()

        self.told.add(barrier)
        self.queues.setdefault(self.role(), []).append(arrive)
        self.step()

    def product_wait(self, left: int, deps: tuple[Product, ...]) -> Any:
        self.step()
        products = self.local.products
        while len(products) > left:
            products.pop(0).finish()
        # Of one in flight nobody may look at the numbers.
        flying = {*map(id, products)}
        done = tuple(x if id(x) in flying else Value(x.result) for x in deps)
        return done if len(done) > 1 else done[0]


class Barriers(list[Barrier]):
    """An array of them, which count nothing until `init` says how much."""

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def index(self, i: Any) -> Barrier:
        return self[int(i)]


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.arrivals = int(count)


def invalidate(barrier: Barrier) -> None:
    assert barrier.count, "ended twice, or before it is made"
    barrier.count = 0


def elementwise(function: Callable[..., Tensor]) -> Callable[..., Value]:
    """A function of tensors and numbers."""
    return lambda *x: Value(function(*(torch.as_tensor(plain(y)) for y in x)))


def power(x: Tensor) -> Tensor:
    """2^x with denormal results flushed, as the GPU's approximation does."""
    y = torch.exp2(x)
    return torch.where(y < 2.0**-126, 0.0, y)


def running_sum(x: Value, axis: int, add: Any, reverse: bool = False) -> Value:
    """The one scan that there is."""
    if reverse:
        return Value(x.data.flip(axis).cumsum(axis).flip(axis))
    return Value(x.data.cumsum(axis))


def assembly(code: str, _constraints: str, x: list[Any], **_: Any) -> Value | None:
    """A logarithm, 1 / x, - x, x in float32, or the wish to have in the cache what lies there."""
    if "prefetch" in code:
        x[0].at(None)
        return None
    if code == "neg.f32 $0, $1;":
        return Value(-x[0].data)
    if code == "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;":
        return Value(x[0].data.float())
    if code == "cvt.rn.bf16x2.f32 $0, $2, $1;":
        return Value(x[0].data.bfloat16())
    if code == "rcp.approx.ftz.f32 $0, $1;":
        return Value(1.0 / x[0].data)
    assert code == "lg2.approx.ftz.f32 $0, $1;"
    return Value(torch.log2(x[0].data))


def language(machine: Machine) -> SimpleNamespace:
    """What kernels call `gl`."""
    nothing = lambda *_, **__: None  # noqa: E731

    def where(condition: Value, x: Any, y: Any) -> Value:
        return Value(torch.where(plain(condition), plain(x), plain(y)))

    def added(at: Pointer, more: int, sem: str) -> Value:
        before = at.load()
        at.store(before + more)
        return Value(before)

    return SimpleNamespace(
        **TYPES, constexpr=None, BlockedLayout=nothing, SliceLayout=nothing,
        DotOperandLayout=nothing, SwizzledSharedLayout=nothing, num_warps=lambda: 1,
        static_range=range, where=where, exp2=elementwise(power),
        exp=elementwise(torch.exp), rsqrt=elementwise(torch.rsqrt), atomic_add=added,
        fma=lambda x, y, z: x * y + z, NVMMADistributedLayout=nothing,
        maximum=elementwise(torch.maximum), minimum=elementwise(torch.minimum),
        arange=lambda start, end, layout: Value(torch.arange(start, end, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout: Value(torch.zeros([int(x) for x in shape], dtype=dtype)),
        sum=lambda x, axis: Value(x.data.sum(axis)), min=lambda x, axis: Value(x.data.amin(axis)),
        associative_scan=running_sum, inline_asm_elementwise=assembly,
        permute=lambda x, order: Value(x.data.permute(order)),
        reshape=lambda x, shape: Value(x.data.reshape(shape)),
        expand_dims=lambda x, axis: Value(x.data.unsqueeze(axis)),
        convert_layout=lambda x, layout: x,
        split=lambda x: (Value(x.data[..., 0]), Value(x.data[..., 1])),
        join=lambda x, y: Value(torch.stack([x.data, y.data], -1)),
        program_id=lambda axis: Value(torch.tensor(machine.program)),
        num_programs=lambda axis: Value(torch.tensor(machine.programs)),
        load=lambda x, mask=None, other=0.0, cache_modifier="": Value(x.load(mask, other)),
        store=lambda x, y, mask=None: x.store(torch.as_tensor(plain(y)), mask),
        shared_memory_descriptor=Barrier,
        allocate_shared_memory=machine.allocate, warp_specialize=machine.specialize,
        barrier=nothing, thread_barrier=nothing,
    )  # fmt: skip


def replaced(machine: Machine) -> dict[str, Any]:
    """What kernels import from Gluon, by the names in their modules."""
    return {
        "gl": language(machine), "barrier": lambda: None, "fence_async_shared": machine.fence,
        "warpgroup_mma": machine.product, "warpgroup_mma_wait": machine.product_wait,
        "tensor_memory_descriptor": TensorMemory, "tcgen05_commit": machine.commit,
        "tcgen05_mma": machine.queued_product, "TensorMemoryLayout": lambda *_: None,
        "allocate_tensor_memory": lambda dtype, shape, _: TensorMemory(machine, dtype, shape),
        "mma_v2": lambda a, b, total: Value(total.data + a.data.float() @ b.data.float()),
        "mbarrier": SimpleNamespace(
            init=init, wait=machine.wait, arrive=machine.arrive, expect=machine.expect,
            invalidate=invalidate, MBarrierLayout=lambda: None,
        ),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=machine.copy_in,
            async_copy_shared_to_global=machine.copy_out, store_wait=machine.store_wait,
        ),
    }  # fmt: skip


def interpreted(kernel: Any, machine: Machine, known: dict[Any, Any] | None = None) -> Any:
    """The kernel's function, with all that it calls, in the interpreter's language."""
    known = {} if known is None else known
    # A kernel's own hash is that of its source, which it takes anew.
    if id(kernel) in known:
        return known[id(kernel)]
    ours = replaced(machine)
    names: dict[str, Any] = {"__builtins__": __builtins__}
    function = FunctionType(
        kernel.fn.__code__, names, kernel.fn.__name__, kernel.fn.__defaults__
    )  # fmt: skip
    known[id(kernel)] = function
    for name, x in kernel.fn.__globals__.items():
        if name in ours:
            names[name] = ours[name]
        elif isinstance(x, FUNCTIONS):
            names[name] = interpreted(x, machine, known)
        elif x is tl:
            names[name] = ours["gl"]
        elif isinstance(x, ModuleType):
            own = {n: f for n, f in vars(x).items() if isinstance(f, FUNCTIONS)}
            own = {n: interpreted(f, machine, known) for n, f in own.items()}
            own |= {n: y.value for n, y in vars(x).items() if isinstance(y, gl.constexpr)}
            names[name] = SimpleNamespace(**own)
        elif isinstance(x, gl.constexpr):
            names[name] = x.value
        elif type(x).__name__ == "ConstexprFunction":
            names[name] = x.fn
        elif isinstance(x, type):
            names[name] = x
    return function


def bare(x: Any) -> Any:
    """A constant as it was before its parts were said to be some."""
    return type(x)(*(getattr(y, "value", y) for y in x)) if isinstance(x, tuple) else x


# Kernels that were launched since.
LAUNCHED: list[str] = []


def interpret_launches(
    monkeypatch: pytest.MonkeyPatch, seed: Callable[[], int], roles: bool = True
) -> None:
    """Launches of fused kernels go through the interpreter, in an order drawn from the seed.

    roles: Kernels share out roles; else each program is one, which waits for copies alone, and
        whose tiles may end below the last row.
    """

    def call(self: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        LAUNCHED.append(self.kernel.__name__)
        named = dict(zip(self.kernel.arg_names, arguments, strict=False))
        for place, width, tile in self.tiles:
            name = self.kernel.arg_names[place]
            if named[name] is not None:
                named[name] = Descriptor(named[name], width, tile, not roles)
        known = {x: bare(self.constants[x]) for x in self.kernel.arg_names if x in self.constants}
        run(self.kernel, grid[0], named | known, seed(), roles)

    LAUNCHED.clear()
    monkeypatch.setattr(FusedLaunch, "__call__", call)


def run(
    kernel: gluon._runtime.GluonJITFunction, programs: int, arguments: dict[str, Any], seed: int,
    roles: bool = True,
) -> None:  # fmt: skip
    """Launch a kernel: one program after the other, tensors and descriptors as they are given."""
    for program in range(programs):
        machine = Machine(program, seed + program, programs)
        given = {name: Pointer(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        whole = partial(interpreted(kernel, machine), **given)
        shared_out = roles and "warp_specialize" in kernel.fn.__code__.co_names
        whole() if shared_out else machine.specialize([(whole, ())])
