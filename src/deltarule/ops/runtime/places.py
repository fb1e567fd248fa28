"""Where a chunk lies: device functions that every kernel over chunks uses.

A chunk holds CT tokens of one sequence, and its CT * n rows of k and v fill the first of BT rows of
a tile. Chunks are numbered so that no program need count those of other sequences: the first chunk
of packed sequence i has the number cu_seqlens[i] // CT + i, and some numbers stay unused.
"""

import triton
import triton.language as tl


@triton.jit
def place_of(TILES: tl.constexpr, HEADS: tl.constexpr):
    """This program's tile, head and place in a grid of one axis: the others end at 65535."""
    i = tl.program_id(0)
    return i % TILES, i // TILES % HEADS, i // (TILES * HEADS)


@triton.jit
def sequence_bounds(cu_seqlens, i_n, T, PACKED: tl.constexpr):
    """First token and number of tokens of sequence i_n; offsets out of range are clamped."""
    start = (i_n * T).to(tl.int64)
    length = T
    if PACKED:
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n).to(tl.int64), 0), T)
        end = tl.minimum(tl.load(cu_seqlens + i_n + 1).to(tl.int64), T)
        length = tl.maximum(end - start, 0).to(tl.int32)
    return start, length


@triton.jit
def first_chunk(start, i_n, T, CT, PACKED: tl.constexpr):
    """The number of the first chunk of sequence i_n, which starts at token `start`."""
    return (start // CT).to(tl.int32) + i_n if PACKED else i_n * tl.cdiv(T, CT)


@triton.jit
def sequence_of(i_m, cu_seqlens, T, N, CT, PACKED: tl.constexpr):
    i_n = i_m // tl.cdiv(T, CT)
    if PACKED:
        # The last sequence whose first chunk is not after this one.
        i_n = i_m * 0
        last = N - 1
        while i_n < last:
            middle = (i_n + last + 1) // 2
            number = (tl.load(cu_seqlens + middle) // CT).to(tl.int32) + middle
            i_n = tl.where(number <= i_m, middle, i_n)
            last = tl.where(number <= i_m, last, middle - 1)
    return i_n


@triton.jit
def chunk_place(i_m, cu_seqlens, T, N, CT, PACKED: tl.constexpr):
    """First token of chunk i_m and how many tokens of its sequence follow (none: <= 0)."""
    i_n = sequence_of(i_m, cu_seqlens, T, N, CT, PACKED)
    start, length = sequence_bounds(cu_seqlens, i_n, T, PACKED)
    before = (i_m - first_chunk(start, i_n, T, CT, PACKED)) * CT
    return start + before, length - before


@triton.jit
def stretch(i_s, cu_seqlens, T, N, per_segment, S: tl.constexpr):
    """What a program goes through: sequence i_s, or where these are split segment i_s of one.

    A segment is a chunk of per_segment * CT tokens, numbered as chunks are. Returns the sequence,
    the first token, the tokens (none: <= 0), the first chunk, the segment's place in the sequence,
    and whether the sequence ends with it.
    """
    if S.SPLIT == "none":
        i_n, place, last = i_s, 0, True
        start, length = sequence_bounds(cu_seqlens, i_n, T, S.PACKED)
        i_m = first_chunk(start, i_n, T, S.CT, S.PACKED)
    else:
        size = per_segment * S.CT
        i_n = sequence_of(i_s, cu_seqlens, T, N, size, S.PACKED)
        start, length = sequence_bounds(cu_seqlens, i_n, T, S.PACKED)
        place = i_s - first_chunk(start, i_n, T, size, S.PACKED)
        i_m = first_chunk(start, i_n, T, S.CT, S.PACKED) + place * per_segment
        start += place * size
        length -= place * size
        last = (length <= size) & ((length > 0) | (place == 0))
        length = tl.minimum(length, size)
    return i_n, start, length, i_m.to(tl.int64), place, last


@triton.jit
def window_bounds(i_s, i_m, chunks, window, per_window, S: tl.constexpr):
    """First and end of the chunks of stretch i_s that lie in a window, and its own first number.

    A window has memory of its own for the chunks [window, window + 1) * per_window, with their own
    numbers: WINDOW "stretch" counts them from the start of each stretch, "row" from that of the one
    row that all sequences share. Chunk c of the stretch is i_m + c of all and number + c of those.
    """
    low, high, number = 0, chunks, i_m
    if S.WINDOW != "none":
        before = window * per_window
        number = (i_s * per_window - before).to(tl.int64)
        if S.WINDOW == "row":
            number = i_m - before
            before = (before - i_m).to(tl.int32)
        low, high = tl.maximum(before, 0), tl.minimum(chunks, before + per_window)
    return low, high, number


@triton.jit
def window_chunk(number, cu_seqlens, T, N, per_segment, window, per_window, S: tl.constexpr):
    """First token, tokens that follow and number of a chunk, given its number in a window."""
    i_m = number
    if S.WINDOW == "stretch":
        i_c = window * per_window + number % per_window
        i_s = number // per_window
        _, start, length, i_m, _, _ = stretch(i_s, cu_seqlens, T, N, per_segment, S)
        i_m += i_c
        first, tokens = start + i_c * S.CT, length - i_c * S.CT
    else:
        if S.WINDOW == "row":
            i_m += window * per_window
        first, tokens = chunk_place(i_m, cu_seqlens, T, N, S.CT, S.PACKED)
    return first, tokens, i_m
