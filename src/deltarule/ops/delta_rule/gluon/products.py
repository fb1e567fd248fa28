"""Products of 64 rows by the tensor cores: all that sm_90 and sm_100 do not share.

    start      total <- a b, or total + a b, in flight      operand   a left operand of 16 bits
    tell       of all that was started, once it is done     put       numbers, as a sum
    finish     wait for that                                value     a sum or operand, in registers

On sm_90 a left operand and a sum are registers of the role, and nobody looks at a sum in flight. On
sm_100 they have places in tensor memory, which the role stores to and loads from, and a barrier is
told when products are done. Where there is no tensor memory, a place and a barrier are 0.
"""

from collections import namedtuple
from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
    tensor_memory_descriptor,
)
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltarule.ops.delta_rule.gluon.memory import CHUNK
from deltarule.ops.runtime.gluon_tiles import barrier, new_barrier

# Of a state role: S, o, and one after the other S K^T and X; rows of P; left operands.
StatePlaces = namedtuple(
    "StatePlaces",
    "state out erased pairs "
    # S, W or X, and X as it is written, in 16 bits.
    "low_state low_values written "
    # Done: S Q^T; S K^T; K Q^T; T W; P X, where o is stored first; what S and o come to.
    "has_out has_erased has_pairs has_values has_read has_state",
)

# Of the score role: K K^T, or without an erase K Q^T.
ScorePlaces = namedtuple("ScorePlaces", "pairs has_pairs")


@triton.constexpr_function
def lanes(columns: int) -> Any:
    return TensorMemoryLayout([64, columns], 1)


@gluon.jit
def room_for(dtype: gl.constexpr, COLUMNS: gl.constexpr):
    return allocate_tensor_memory(dtype, [CHUNK, COLUMNS], lanes(COLUMNS))


@gluon.jit
def told():
    """A barrier that the tensor cores tell."""
    return new_barrier(1, 1).index(0)


@gluon.jit
def state_places(dtype: gl.constexpr, FORM: gl.constexpr):
    """A state role's, which makes its share of the rows of P."""
    QUERIES: gl.constexpr = CHUNK // FORM.STEPS
    ROWS: gl.constexpr = QUERIES // FORM.PARTS
    found = StatePlaces(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    if FORM.TENSOR:
        erased, pairs, has_erased, has_pairs, has_values, has_read = 0, 0, 0, 0, 0, 0
        if FORM.TIED:
            erased, pairs = room_for(gl.float32, CHUNK), room_for(gl.float32, ROWS)
            has_erased, has_pairs, has_values, has_read = told(), told(), told(), told()
        found = StatePlaces(
            room_for(gl.float32, FORM.K), room_for(gl.float32, QUERIES), erased, pairs,
            room_for(dtype, FORM.K), room_for(dtype, CHUNK), room_for(dtype, CHUNK),
            told(), has_erased, has_pairs, has_values, has_read, told(),
        )  # fmt: skip
    return found


@gluon.jit
def score_places(FORM: gl.constexpr):
    found = ScorePlaces(0, 0)
    if FORM.TENSOR:
        COLUMNS: gl.constexpr = CHUNK if FORM.TIED else CHUNK // FORM.STEPS
        found = ScorePlaces(room_for(gl.float32, COLUMNS), told())
    return found


@gluon.jit
def start(place, a, b, total, use_acc: gl.constexpr = True):
    """a b, or added to the total, in flight."""
    if isinstance(place, tensor_memory_descriptor):
        if use_acc:
            put(place, total)
        else:
            # All warps have read what was here.
            barrier()
        tcgen05_mma(a, b, place, use_acc=use_acc)
        found = place
    else:
        found = warpgroup_mma(a, b, total, use_acc=use_acc, is_async=True)
    return found


@gluon.jit
def tell(done):
    """Have this barrier told when all products are done that were started."""
    if isinstance(done, gl.shared_memory_descriptor):
        tcgen05_commit(done)


@gluon.jit
def finish(sums, done, phase, LEFT: gl.constexpr = 0):
    """The sums, done: the barrier was told of them, or none is in flight but the LEFT last ones."""
    if isinstance(done, gl.shared_memory_descriptor):
        mbarrier.wait(done, phase)
        found = sums
        if len(sums) == 1:
            found = sums[0]
    else:
        found = warpgroup_mma_wait(LEFT, deps=sums)
    return found


@gluon.jit
def put(place, x):
    """x where a sum is, unless it is there."""
    found = x
    if isinstance(place, tensor_memory_descriptor):
        if not isinstance(x, tensor_memory_descriptor):
            place.store(x)
        found = place
    return found


@gluon.jit
def operand(place, x, LAYOUT: gl.constexpr):
    if isinstance(place, tensor_memory_descriptor):
        place.store(x)
        found = place
    else:
        found = gl.convert_layout(x, LAYOUT)
    return found


@gluon.jit
def value(x, LAYOUT: gl.constexpr):
    """A sum or an operand, in registers."""
    if isinstance(x, tensor_memory_descriptor):
        found = x.load(LAYOUT)
    else:
        found = gl.convert_layout(x, LAYOUT)
    return found
