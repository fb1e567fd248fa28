"""The role that loads the tiles of the forward with a decay per channel, by the copy engine alone.

Of a last chunk that is not whole it brings the tokens up to the sequence's end, and zeros in place
of the others (runtime/tensor_maps.py says how it knows).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deltarule.ops.delta_rule.gluon.gradient_memory import load
from deltarule.ops.delta_rule.gluon.memory import CHUNK, VALUES


@gluon.jit
def channel_load_role(
    shared, of, K: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr, ENDS: gl.constexpr
):  # fmt: skip
    """One warp: q, k, v and log decays, in the order in which their places become free.

    That of log decays is free as soon as their chunk is scaled: with as many places as q, k and v
    have it is the first of a chunk's, and with one it is the last.
    """
    tiles, barriers, place, _ = shared
    q, k, v, log_decay = of
    BYTES: gl.constexpr = CHUNK * (2 * K + PARTS * VALUES) * 2
    DECAY_SLOTS: gl.constexpr = tiles.decays.shape[0]
    for i in range(place.chunks):
        slot, token = i % SLOTS, place.start.to(gl.int32) + i * CHUNK
        rows, column = gl.minimum(place.tokens - i * CHUNK, CHUNK), place.key_head * K
        if DECAY_SLOTS == SLOTS:
            load_decays(shared, log_decay, i, token, rows, K, SLOTS, ENDS)
        mbarrier.wait(barriers.empty.index(slot), ((i // SLOTS) & 1) ^ 1)
        full = barriers.full.index(slot)
        mbarrier.expect(full, BYTES)
        load(k, token, column, rows, full, tiles.k.index(slot), ENDS)
        load(q, token, column, rows, full, tiles.q.index(slot), ENDS)
        for part in gl.static_range(PARTS):
            column = (place.value_head * PARTS + part) * VALUES
            load(v, token, column, rows, full, tiles.v.index(slot * PARTS + part), ENDS)
        if DECAY_SLOTS < SLOTS:
            load_decays(shared, log_decay, i, token, rows, K, SLOTS, ENDS)


@gluon.jit
def load_decays(
    shared, log_decay, i, token, rows, K: gl.constexpr, SLOTS: gl.constexpr, ENDS: gl.constexpr
):  # fmt: skip
    """Those of a chunk, once all have scaled what lay there."""
    tiles, barriers, place, _ = shared
    DECAY_SLOTS: gl.constexpr = tiles.decays.shape[0]
    before, slot = i + SLOTS - DECAY_SLOTS, i % DECAY_SLOTS
    mbarrier.wait(barriers.copied.index(before % SLOTS), ((before // SLOTS) & 1) ^ 1)
    fetched = barriers.fetched.index(slot)
    mbarrier.expect(fetched, CHUNK * K * 4)
    load(log_decay, token, place.value_head * K, rows, fetched, tiles.decays.index(slot), ENDS)
