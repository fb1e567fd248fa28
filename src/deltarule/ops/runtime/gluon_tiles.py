"""What kernels in Gluon share: tiles as the copy engine brings them, barriers, and their launch."""

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deltarule.ops.runtime.launch import Launch

# Its name from Triton 3.7 on, and the one before.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@triton.constexpr_function
def square(rank: int = 2, bits: int = 16) -> Any:
    """Tiles as the copy engine takes them, and of 16 bits products, too."""
    return gl.NVMMASharedLayout(128, bits, rank=rank)


@gluon.jit
def new_barrier(number: gl.constexpr, count: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.jit
def present(x, other):
    """x, or where it is None another thing, which nobody touches: before Triton 3.7 a tuple has no
    None."""
    if x is None:
        found = other
    else:
        found = x
    return found


@gluon.jit
def end_barriers(barriers):
    """Invalidate a kernel's barriers, once all its roles are done.

    Without this the compiler puts other numbers where a barrier lies that a form has no use for,
    and a GPU writes its barriers anew when it changes between processes.
    """
    for i in gl.static_range(len(barriers)):
        end_barrier(barriers[i])


@gluon.jit
def end_barrier(barriers):
    NUMBER: gl.constexpr = barriers.shape[0]
    for i in gl.static_range(NUMBER):
        mbarrier.invalidate(barriers.index(i))


class FusedLaunch(Launch):
    """A launch whose tiles have layouts, as Gluon wants it said."""

    def given(self, arguments: tuple[Any, ...]) -> list[Any]:
        given = super().given(arguments)
        for place, _, tile in self.tiles:
            if (x := given[place]) is not None:
                layout = self.layout(len(tile), 8 * x.base.itemsize)
                given[place] = TensorDescriptor(x.base, x.shape, x.strides, tile, layout)
        return given

    def layout(self, rank: int, bits: int) -> Any:
        """Of tiles in shared memory."""
        return square(rank, bits)
