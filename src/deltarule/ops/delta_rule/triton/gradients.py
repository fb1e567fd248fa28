"""The gradients of a chunk from the states around it, all chunks at once; decay none or per head.

S is the state at the chunk's start, D the gradient by the state at its end, E the prediction
errors (without an erase: v), X the gradient by F / beta (by w), c_ij and m_ij the factors of
q_i . k_j in P and of k_i . k_j in M:

    GP_ij = c_ij dO_i . w_j                           w = beta E
    GM_ij = -m_ij beta_i X_i . w_j
    dq  = read S^T dO + GP k
    row = -erase beta S^T X + GM k                    through what k_i reads
    col = write D^T w + GP^T q + GM^T k               through what k_j writes
    dk  = row + col         dv = beta X         dbeta = E . X

A decay reaches every pair of rows around it, and the states around the chunk:

    dlog_decay_t = sum_{i >= t > j} (GP_ij q_i . k_j + GM_ij k_i . k_j)
                 + sum_{i >= t} (read_i q_i . S^T dO_i - erase_i beta_i k_i . S^T X_i)
                 + sum_{j < t} write_j k_j . D^T w_j + decay[0, end] <D, S>

A program takes BC channels of q and k of one chunk and one key head, and adds up the value heads in
order; what has no such channels, dbeta and (where the scan back leaves it to them) dv, the programs
of a chunk share. In 16 bits the pairs are summed as those of the rows from t on less those of the
columns from t on, q . GP k and k . GP^T q, in which the pairs within cancel to float32. For float32
that is too few digits: one more program sums the pairs across t alone. With `normalize_qk` the
scalings hold 1 / |x|, and dx <- dx - (x . dx) x / |x|^2: that takes all channels, and is left to
`unit_norm_gradients_kernel` where a program has some of them.

In a loop with products of 16 bits, a tile is an operand of products and nothing else. One that is
also read into registers gets a single buffer from Triton (3.6 to 3.9), and the next tile overwrites
it while a product still reads it; one that was computed stays in registers, which the assembler of
Triton 3.6 overwrites likewise. So rows are scaled after the products, dv reads X again, and <D, S>
is the trace of D S^T, of tiles of at least 64 rows: a product of fewer reads them into registers.
"""

from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import plan, tiles
from deltarule.ops.delta_rule.triton.decay_pairs import pair_decay_gradients
from deltarule.ops.delta_rule.triton.fetched import gradient_tiles
from deltarule.ops.delta_rule.triton.plan import COPY_ENGINE, WHOLE, Call, Shapes, Window
from deltarule.ops.delta_rule.triton.tile_sizes import architecture, configuration
from deltarule.ops.delta_rule.triton.tiles import RESET, SCALING, SCALINGS, SUM
from deltarule.ops.runtime.places import place_of, window_chunk

# Row factors and decays of chunks, where else gradients go, and X as a pointer.
Factors = namedtuple("Factors", "scalings chunk_decay p_x d_v d_beta p_part")


@triton.jit(do_not_specialize=["T", "N", "s_slice", "per_segment", "window", "per_window"])
def decay_gradients_kernel(
    parts, log_decay, cu_seqlens, d_log_decay, T, N, s_decay_b, s_decay_t, s_decay_h, s_slice,
    S: tl.constexpr, per_segment=None, window=None, per_window=None,
):  # fmt: skip
    """One chunk of one value head, BD numbers of whose HELD count; a reset gets no gradient."""
    number, i_h = tl.program_id(0), tl.program_id(1)
    first, tokens, _ = window_chunk(number, cu_seqlens, T, N, per_segment, window, per_window, S)
    if tokens <= 0:
        return
    o_r = tl.arange(0, S.BT)
    o_t, m_t = o_r // S.N_STEPS, o_r % S.N_STEPS == 0
    p_x = parts + (number.to(tl.int64) * S.HV + i_h) * 4 * S.BT
    b_later, b_before = tl.zeros([S.BT], tl.float32), tl.zeros([S.BT], tl.float32)
    b_held = 0.0
    for i_c in tl.static_range(S.SLICES):
        p_c = p_x + i_c * s_slice
        b_later += tl.load(p_c + SUM.QUERIES * S.BT + o_t, mask=m_t, other=0.0)
        b_later += tl.load(p_c + SUM.KEYS * S.BT + o_r)
        b_before += tl.load(p_c + SUM.WRITES * S.BT + o_r)
        b_held += tl.sum(tl.load(p_c + SUM.HELD * S.BT + tl.arange(0, S.BD)), axis=0)
    b_dg = tl.cumsum(b_later, axis=0, reverse=True) + tl.cumsum(b_before, axis=0) - b_before
    b_dg += b_held
    if S.PAIRS:
        b_dg += tl.load(p_x + S.SLICES * s_slice + o_t)
    m_t &= o_r < tl.minimum(tokens, S.CT) * S.N_STEPS
    p_g = log_decay + (first // T) * s_decay_b + (first % T + o_t) * s_decay_t + i_h * s_decay_h
    b_g = tl.load(p_g, mask=m_t, other=0.0)
    p_dg = d_log_decay + (first + o_t) * S.HV + i_h
    tl.store(p_dg, tl.where(b_g < RESET, 0.0, b_dg), mask=m_t)


@triton.jit
def store_held(p_part, b_held, b_chunk, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Leave numbers whose sum is <D, S> times the chunk's decay: BT of them at most."""
    if PRECISION != "tf32x3":
        b_held = tiles.diagonal(b_held)
    tl.store(p_part + SUM.HELD * BT + tl.arange(0, b_held.shape[0]), b_held * b_chunk)


@triton.jit
def written_over_values(b_col, b_held, x, at, i_k, S: tl.constexpr):
    """w D and <D, S>: the loop that adds to other heads' dq and dk has no registers left for it."""
    for i_v in range(0, S.V, S.BV):
        b_e = tiles.load_errors(x, at, i_v, S)
        b_d = tiles.load_state(x.d_states, at.own, i_v, i_k, S)
        b_col = tl.dot(b_e, b_d, acc=b_col, input_precision=S.PRECISION)
        if S.HAS_DECAY:
            b_s = tiles.load_state(x.states, at.own, i_v, i_k, S)
            b_held = tiles.add_held(b_held, b_d, b_s, S.PRECISION)
    return b_col, b_held


@triton.jit
def store_value_gradients(p_x, b_beta, p_dv, rows, i_c, S: tl.constexpr):
    """dv = beta X of every SLICES-th tile of values from the i_c-th on."""
    STEP: tl.constexpr = (S.K + S.BC - 1) // S.BC * S.BV
    o_r = tl.arange(0, S.BT)
    m_r = o_r < rows
    for i_v in tl.static_range(0, S.V, STEP):
        o_v = i_v + i_c * S.BV + tl.arange(0, S.BV)
        b_x = tiles.load_rows(p_x, o_r, m_r, o_v, S.V, S.V, S.V % STEP == 0)
        b_dv = b_x.to(tl.float32) * b_beta[:, None]
        tiles.store_rows(p_dv, b_dv, o_r, m_r, o_v, S.V, S.HV * S.V)


@triton.jit(do_not_specialize=["T", "N", "s_slice", "per_segment", "window", "per_window"])
def gradients_kernel(
    q, k, v, cu_seqlens, scalings, chunk_decay, states, errors, d_o, d_states, d_errors, p_x, d_q,
    d_k, d_v, d_beta, parts, scale, T, N, s_slice, S: tl.constexpr, per_segment=None, window=None,
    per_window=None,
):  # fmt: skip
    """Gradients in the layouts of their tensors, and `parts` of dlog_decay.

    With TMA v, states, errors, d_o, d_states and d_errors are descriptors and every tile is full;
    p_x are the same d_errors as a pointer, for d_v. With a WINDOW states, errors,
    their gradients and the parts have the numbers of its chunks.
    """
    x = tiles.Around(v, states, errors, d_o, d_states, d_errors)
    SLICES: tl.constexpr = (S.K + S.BC - 1) // S.BC
    # The programs of a chunk run side by side, and share what they read in the cache.
    PAIRS: tl.constexpr = S.HAS_DECAY and S.PRECISION == "tf32x3"
    i_c, i_key, number = place_of(SLICES + PAIRS, S.H)
    first, tokens, i_m = window_chunk(number, cu_seqlens, T, N, per_segment, window, per_window, S)
    if tokens <= 0:
        return
    tokens = tl.minimum(tokens, S.CT)
    o_i, o_r, o_k = tl.arange(0, S.BQ), tl.arange(0, S.BT), i_c * S.BC + tl.arange(0, S.BC)
    m_i, m_r = o_i < tokens, o_r < tokens * S.N_STEPS
    if i_c < SLICES:
        row_q, row_k = (first * S.H + i_key) * S.K, (first * S.N_STEPS * S.H + i_key) * S.K
        p_q, p_k = q + row_q, k + row_k
        b_q = tiles.load_rows(p_q, o_i, m_i, o_k, S.K, S.H * S.K, S.K % S.BC == 0)
        b_k = tiles.load_rows(p_k, o_r, m_r, o_k, S.K, S.H * S.K, S.K % S.BC == 0)
        norm_q, norm_k = tl.full([S.BQ], 1.0, tl.float32), tl.full([S.BT], 1.0, tl.float32)
        if S.UNIT_NORM:
            # A norm has all channels, though the program takes BC of them.
            o_all = tl.arange(0, S.BK)
            b_all_q = tiles.load_rows(p_q, o_i, m_i, o_all, S.K, S.H * S.K, S.K == S.BK)
            norm_q = tiles.inverse_norm(b_all_q)
            b_all_k = tiles.load_rows(p_k, o_r, m_r, o_all, S.K, S.H * S.K, S.K == S.BK)
            norm_k = tiles.inverse_norm(b_all_k)
        b_dq, b_dk = tl.zeros([S.BQ, S.BC], tl.float32), tl.zeros([S.BT, S.BC], tl.float32)
        for i_g in range(S.HV // S.H):
            i_h = i_key * (S.HV // S.H) + i_g
            i_slot, i_own = i_m.to(tl.int64) * S.HV + i_h, number.to(tl.int64) * S.HV + i_h
            at = tiles.Chunk(first, tokens, tokens * S.N_STEPS, i_h, i_slot, i_own)
            p_part = parts
            if S.HAS_DECAY:
                p_part += i_c * s_slice + i_own * 4 * S.BT
            y = Factors(scalings, chunk_decay, p_x, d_v, d_beta, p_part)
            of = b_dq, b_dk, b_q, b_k, norm_q * scale, norm_k
            b_dq, b_dk = add_value_head(of, x, y, at, i_c, S, S.HV > S.H)
        if S.UNIT_NORM and SLICES == 1:
            b_dq = tiles.unit_norm_backward(b_q, norm_q, b_dq)
            b_dk = tiles.unit_norm_backward(b_k, norm_k, b_dk)
        tiles.store_rows(d_q + row_q, b_dq, o_i, m_i, o_k, S.K, S.H * S.K)
        tiles.store_rows(d_k + row_k, b_dk, o_r, m_r, o_k, S.K, S.H * S.K)
    elif PAIRS:
        for i_g in range(S.HV // S.H):
            i_h = i_key * (S.HV // S.H) + i_g
            i_slot, i_own = i_m.to(tl.int64) * S.HV + i_h, number.to(tl.int64) * S.HV + i_h
            at = tiles.Chunk(first, tokens, tokens * S.N_STEPS, i_h, i_slot, i_own)
            p_q, p_k = q + (first * S.H + i_key) * S.K, k + (first * S.N_STEPS * S.H + i_key) * S.K
            p_part = parts + SLICES * s_slice + i_own * 4 * S.BT
            pair_decay_gradients(p_q, p_k, x, scalings, p_part, scale, at, S)


@triton.jit
def add_value_head(of, x, y, at, i_c, S: tl.constexpr, ADDED: tl.constexpr):
    """dq and dk, ADDED to those of other value heads; its dbeta, dlog_decay and dv are stored.

    With ADDED there are fewer registers, so that the values are taken in two loops.
    """
    b_dq, b_dk, b_q, b_k, norm_q, norm_k = of
    EXACT: tl.constexpr = S.PRECISION == "tf32x3"
    o_i, o_r, i_k = tl.arange(0, S.BQ), tl.arange(0, S.BT), i_c * S.BC
    m_i, m_r = o_i < at.tokens, o_r < at.rows
    dtype = b_k.dtype
    # Loaded before the loop, and used after it.
    b_one = tl.full([S.BT], 1.0, tl.float32)
    b_beta = tiles.row_scaling(y.scalings, at.slot, SCALING.BETA, b_one, o_r, S.TIED, S)
    b_reads = tiles.row_scaling(y.scalings, at.slot, SCALING.READ, norm_q, o_i, S.HAS_DECAY, S)
    b_erases = tiles.row_scaling(y.scalings, at.slot, SCALING.ERASE, norm_k, o_r, S.HAS_DECAY, S)
    b_writes = tiles.row_scaling(y.scalings, at.slot, SCALING.WRITE, norm_k, o_r, S.HAS_DECAY, S)
    if S.HAS_DECAY:
        b_chunk = tl.load(y.chunk_decay + at.slot)
    if y.d_v is not None:
        # While the registers are still free that the loop fills.
        p_dv = y.d_v + (at.first * S.N_STEPS * S.HV + at.head) * S.V
        store_value_gradients(y.p_x + at.own * S.BT * S.V, b_beta, p_dv, at.rows, i_c, S)
    b_gp, b_gm, b_read, b_row, b_col, b_held = tiles.over_values(x, at, o_i, m_i, i_k, S, not ADDED)
    # What is no longer needed is stored first: this kernel is limited by its registers.
    if S.HAS_DECAY:
        p_s = y.scalings + at.slot * SCALINGS * S.BT
        whole, rest, whole_q, rest_q = tiles.load_chunk_sums(p_s, o_r, o_i, S.N_STEPS, S.BT)
        if not ADDED:
            store_held(y.p_part, b_held, b_chunk, S.BT, S.PRECISION)
    if S.TIED:
        p_dbeta = y.d_beta + (at.first * S.N_STEPS + o_r) * S.HV + at.head
        tl.store(p_dbeta, tiles.diagonal(b_gm), mask=m_r & (i_c == 0))
    b_read *= b_reads[:, None]
    if not ADDED:
        b_col *= (b_writes * b_beta)[:, None]
    b_key = norm_k * b_beta
    b_factor = b_key[None, :]
    if S.HAS_DECAY:
        b_factor *= tiles.pair_decays(whole_q, rest_q, whole, rest)
    m_pair = o_r[None, :] // S.N_STEPS <= o_i[:, None]
    b_gp = tl.where(m_pair, b_gp * norm_q[:, None] * b_factor, 0.0)
    b_later_q, b_later_k = tl.zeros([S.BQ], tl.float32), tl.zeros([S.BT], tl.float32)
    if S.HAS_DECAY and EXACT:
        b_later_q = tiles.operand_products(b_q, b_read, S.PRECISION)
    b_gp = b_gp.to(dtype)
    b_read = tl.dot(b_gp, b_k, acc=b_read, input_precision=S.PRECISION)
    b_inner = tl.dot(tl.trans(b_gp), b_q, input_precision=S.PRECISION)
    if S.TIED:
        m_before = o_r[:, None] > o_r[None, :]
        if S.HAS_DECAY and S.N_STEPS > 1:
            b_factor = b_key[None, :] * tiles.pair_decays(whole, rest, whole, rest)
        b_gm = tl.where(m_before, b_gm * (-b_key)[:, None] * b_factor, 0.0)
        b_row *= -(b_erases * b_beta)[:, None]
        if S.HAS_DECAY and EXACT:
            b_later_k = tiles.operand_products(b_k, b_row, S.PRECISION)
        b_gm = b_gm.to(dtype)
        b_row = tl.dot(b_gm, b_k, acc=b_row, input_precision=S.PRECISION)
        b_inner = tl.dot(tl.trans(b_gm), b_k, acc=b_inner, input_precision=S.PRECISION)
    if S.HAS_DECAY:
        if not EXACT:
            b_later_q = tiles.operand_products(b_q, b_read, S.PRECISION)
            b_later_k = tiles.operand_products(b_k, b_row - b_inner, S.PRECISION)
        tl.store(y.p_part + SUM.QUERIES * S.BT + o_i, b_later_q)
        tl.store(y.p_part + SUM.KEYS * S.BT + o_r, b_later_k)
    b_row += b_inner
    if ADDED:
        b_read, b_row = b_dq + b_read, b_dk + b_row
        b_col, b_held = written_over_values(b_col, b_held, x, at, i_k, S)
        b_col *= (b_writes * b_beta)[:, None]
        if S.HAS_DECAY:
            store_held(y.p_part, b_held, b_chunk, S.BT, S.PRECISION)
    if S.HAS_DECAY:
        tl.store(
            y.p_part + SUM.WRITES * S.BT + o_r, tiles.operand_products(b_k, b_col, S.PRECISION)
        )
    return b_read, b_col + b_row


def own_shapes(call: Call, slots: int, again: bool) -> Shapes:
    """What the backward keeps of a window's chunks: D, X, parts of dlog_decay (and S and E)."""
    inputs, rows = call.inputs, call.plan.sizes["BT"]
    (_, heads, value_size, key_size), dtype = inputs.state_shape, inputs.q.dtype
    around: Shapes = {"states": ((slots, heads, value_size, key_size), dtype)}
    if inputs.beta is not None:
        around["errors"] = (slots, heads, rows, value_size), dtype
    shapes = {f"d_{name}": of for name, of in around.items()}
    if inputs.log_decay is not None:
        parts = slices(call) + sums_pairs(inputs), slots, heads, 4, rows
        shapes["parts"] = parts, torch.float32
    return shapes | around if again else shapes


def room_in_gradients(call: Call) -> dict[str, Tensor]:
    """Tensors of the gradients that the scan back writes: dv, or none."""
    return {"d_v": call["d_v"]} if scan_back_has_values(call) else {}


def scan_back_has_values(call: Call) -> bool:
    """Whether the scan back writes dv: where nothing else needs X, or value heads share keys.

    For each value head alone it takes the scan longer than the gradients, which have X anyway.
    """
    return call.inputs.beta is None or call.plan.sizes["HV"] > call.plan.sizes["H"]


def add_gradients(call: Call, own: Mapping[str, Tensor], window: Window = WHOLE) -> None:
    """Launch `gradients_kernel` and what adds up the decays, for the chunks of a window.

    `own` has D, X and the parts of these chunks alone, and S and E unless all chunks have them.
    """
    sums, heads, x = own.get("parts"), call.plan.sizes["H"], own.get("d_errors")
    each = 0 if sums is None else sums.stride(0)
    chunks = window.constants() | {"s_slice": each, "parts": sums}
    d_v = None if scan_back_has_values(call) else call["d_v"]
    config, slots = call.once(gradients_config), len(own["d_states"])
    given = config | chunks | own | {"d_errors": x, "p_x": x, "d_v": d_v}
    grid = (slices(call) + sums_pairs(call.inputs)) * heads * slots, 1, 1
    call.launch(gradients_kernel, grid, given, gradient_tiles)
    if sums is not None:
        given = chunks | {"SPLIT": call.plan.split, "num_warps": 1, "num_stages": 1}
        given |= {"SLICES": slices(call), "PAIRS": sums_pairs(call.inputs), "BD": config["BV"]}
        call.launch(decay_gradients_kernel, (slots, call.plan.sizes["HV"], 1), given)


def gradients_config(call: Call) -> dict[str, Any]:
    inputs, sizes = call.inputs, call.plan.sizes
    config, low = configuration("gradients", call.plan.tile_key), inputs.q.dtype != torch.float32
    # For fewer rows Triton takes other instructions, whose operands are registers.
    reads = max(sizes["BQ"], sizes["BT"]) if low else sizes["BQ"]
    # Rows of the state that are taken at once: BT at most, to leave a sum of each. With fewer those
    # other instructions would make D S^T, too.
    all_rows = low and inputs.log_decay is not None
    fetched = architecture(inputs.q.device) >= COPY_ENGINE
    values = sizes["BT"] if fetched and all_rows else min(config["BV"], sizes["BT"])
    # In float32 a gradient is not rounded before it goes through the norm, which takes all of it.
    whole = inputs.normalize_qk and not low
    channels = sizes["BK"] if whole else min(config["BC"], sizes["BK"])
    # A tile that is fetched has no rows of the next chunk.
    full = plan.full_tiles(inputs, call.plan, values) and sizes["BQ"] == sizes["BT"]
    full = full and not sums_pairs(inputs)
    own = {"BQ": reads, "BV": values, "BC": channels, "TMA": full, "SPLIT": call.plan.split}
    return config | own


def rows_are_cut(call: Call) -> bool:
    """Whether programs take some channels of a row: only whole rows go through the norm."""
    return slices(call) > 1


def slices(call: Call) -> int:
    """Programs of a chunk and key head, each of which takes BC channels."""
    return plan.blocks(call.plan.sizes["K"], call.once(gradients_config)["BC"])


def sums_pairs(inputs: Inputs) -> bool:
    """Whether one more program sums the pairs of rows around a decay: in float32 alone."""
    return inputs.log_decay is not None and inputs.q.dtype == torch.float32
