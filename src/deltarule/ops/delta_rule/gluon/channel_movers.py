"""The role that loads the tiles of the forward with a decay per channel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deltarule.ops.delta_rule.gluon.memory import CHUNK
from deltarule.ops.delta_rule.gluon.movers import load, load_chunk


@gluon.jit
def channel_load_role(
    shared, of, log_decay, K: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """One warp: q, k, v and log decays, in the order in which their places become free.

    That of log decays is free as soon as their chunk is scaled: with as many places as q, k and v
    have it is the first of a chunk's, and with one it is the last.
    """
    tiles, _, place, _ = shared
    DECAY_SLOTS: gl.constexpr = tiles.decays.shape[0]
    for i in range(place.chunks):
        if DECAY_SLOTS == SLOTS:
            load_decays(shared, log_decay, i, K, SLOTS, FORM)
        load_chunk(shared, of, i, K, PARTS, SLOTS, FORM)
        if DECAY_SLOTS < SLOTS:
            load_decays(shared, log_decay, i, K, SLOTS, FORM)


@gluon.jit
def load_decays(shared, log_decay, i, K: gl.constexpr, SLOTS: gl.constexpr, FORM: gl.constexpr):
    """Those of a chunk, once all have scaled what lay there."""
    tiles, barriers, place, _ = shared
    DECAY_SLOTS: gl.constexpr = tiles.decays.shape[0]
    before, slot = i + SLOTS - DECAY_SLOTS, i % DECAY_SLOTS
    mbarrier.wait(barriers.copied.index(before % SLOTS), ((before // SLOTS) & 1) ^ 1)
    fetched = barriers.fetched.index(slot)
    mbarrier.expect(fetched, CHUNK * K * 4)
    token, left = place.start.to(gl.int32) + i * CHUNK, gl.minimum(place.tokens - i * CHUNK, CHUNK)
    column, tile = place.value_head * K, tiles.decays.index(slot)
    load(log_decay, token, column, left, fetched, tile, FORM.ENDS)
