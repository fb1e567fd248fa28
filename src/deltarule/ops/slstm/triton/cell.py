"""The cell of sLSTM as kernels compute it, for tiles of sequences and channels.

    c = f' c + i' tanh(z)        n = f' n + i'        h = sigmoid(o) c / n

of gates that have seen R h; where a sequence has no token, all stays as it was.
"""

import triton
import triton.language as tl

# Sequences of a program, the fewest rows that a product takes.
ROWS = 16
PRECISION = tl.constexpr("tf32x3")


@triton.jit
def load_four(x, place, mask, D: tl.constexpr):
    """Four tiles that lie D numbers apart, in float32."""
    b_0 = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    b_1 = tl.load(x + place + D, mask=mask, other=0.0).to(tl.float32)
    b_2 = tl.load(x + place + 2 * D, mask=mask, other=0.0).to(tl.float32)
    b_3 = tl.load(x + place + 3 * D, mask=mask, other=0.0).to(tl.float32)
    return b_0, b_1, b_2, b_3


@triton.jit
def store_four(x, place, mask, b_0, b_1, b_2, b_3, D: tl.constexpr):
    tl.store(x + place, b_0, mask=mask)
    tl.store(x + place + D, b_1, mask=mask)
    tl.store(x + place + 2 * D, b_2, mask=mask)
    tl.store(x + place + 3 * D, b_3, mask=mask)


@triton.jit
def log_sigmoid(b_x):
    """-log(1 + e^-x), as exact where e^-x is small: a memory sums it over thousands of tokens."""
    b_e = tl.exp(-tl.abs(b_x))
    b_u = 1.0 + b_e
    b_log = tl.where(b_u == 1.0, b_e, tl.log(b_u) * (b_e / tl.where(b_u == 1.0, 1.0, b_u - 1.0)))
    return tl.minimum(b_x, 0.0) - b_log


@triton.jit
def tanh(b_x):
    """(1 - e^-2|x|) / (1 + e^-2|x|), with the sign of x; near zero, where 1 - e^-2|x| loses digits,
    x - x^3 / 3 + 2 x^5 / 15 - ..
    """
    b_e = tl.exp(-2.0 * tl.abs(b_x))
    b_y = (1.0 - b_e) / (1.0 + b_e)
    b_s = b_x * b_x
    b_near = 1.0 - b_s * (1 / 3 - b_s * (2 / 15 - b_s * (17 / 315 - b_s * (62 / 2835))))
    return tl.where(tl.abs(b_x) < 0.25, b_x * b_near, tl.where(b_x < 0, -b_y, b_y))


@triton.jit
def rows_of_program(start, length, N, i_h, o_d, H: tl.constexpr, D: tl.constexpr, BB: tl.constexpr):
    """Sequences of this program, their first rows, their tokens, and where their states lie."""
    o_n = tl.program_id(0) * BB + tl.arange(0, BB)
    m_n = o_n < N
    first = tl.load(start + o_n, mask=m_n, other=0)
    tokens = tl.load(length + o_n, mask=m_n, other=0)
    o_n = tl.minimum(o_n, N - 1).to(tl.int64)
    mask = m_n[:, None] & (o_d < D)[None, :]
    return m_n, first, tokens, mask, ((o_n * H + i_h) * 4 * D)[:, None] + o_d[None, :]


@triton.jit
def step(b_i, b_f, b_z, b_o, b_h, b_c, b_n, b_m, here):
    """h, c, n and m after a token; n = 0 says that none came before."""
    b_kept = log_sigmoid(b_f) + b_m
    b_top = tl.where(b_n == 0.0, b_i, tl.maximum(b_kept, b_i))
    b_forget = tl.where(b_n == 0.0, 0.0, tl.exp(b_kept - b_top))
    b_write = tl.exp(b_i - b_top)
    b_c = tl.where(here, b_forget * b_c + b_write * tanh(b_z), b_c)
    b_n = tl.where(here, b_forget * b_n + b_write, b_n)
    b_h = tl.where(here, tl.sigmoid(b_o) * b_c / tl.where(b_n == 0.0, 1.0, b_n), b_h)
    return b_h, b_c, b_n, tl.where(here, b_top, b_m)


@triton.jit
def states_of(states, before, p_state, place, t, here, H: tl.constexpr, D: tl.constexpr):
    """c, n and m of a token, and of what came before it: a token, or the sequence's own state."""
    _, b_c, b_n, b_m = load_four(states, place, here, D)
    _, b_c0, b_n0, b_m0 = load_four(before, p_state, here & (t == 0)[:, None], D)
    _, b_c1, b_n1, b_m1 = load_four(states, place - 4 * H * D, here & (t > 0)[:, None], D)
    return b_c, tl.where(here, b_n, 1.0), b_m, b_c1 + b_c0, b_n1 + b_n0, b_m1 + b_m0


@triton.jit
def step_back(b_gates, b_states, b_dh, b_dc, b_dn, here):
    """Gradients by the four gates of a token, and by c and n before it; m is a constant."""
    b_i, b_f, b_z, b_o = b_gates
    b_c, b_n, b_m, b_c1, b_n1, b_m1 = b_states
    b_kept = tl.where(b_n1 == 0.0, 0.0, tl.exp(log_sigmoid(b_f) + b_m1 - b_m))
    b_write, b_v, b_r = tl.exp(b_i - b_m), tanh(b_z), tl.sigmoid(b_o)
    b_dc_, b_dn_ = b_dc + b_dh * b_r / b_n, b_dn - b_dh * b_r * b_c / (b_n * b_n)
    b_di = tl.where(here, (b_dc_ * b_v + b_dn_) * b_write, 0.0)
    b_df = tl.where(here, (b_dc_ * b_c1 + b_dn_ * b_n1) * b_kept * tl.sigmoid(-b_f), 0.0)
    b_dz = tl.where(here, b_dc_ * b_write * (1.0 - b_v * b_v), 0.0)
    b_do = tl.where(here, b_dh * b_c / b_n * b_r * (1.0 - b_r), 0.0)
    b_dc = tl.where(here, b_dc_ * b_kept, b_dc)
    return b_di, b_df, b_dz, b_do, b_dc, tl.where(here, b_dn_ * b_kept, b_dn)
