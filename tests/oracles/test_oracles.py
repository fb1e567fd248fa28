"""Each oracle against its authors' numbers, a second form of the same maths, or a limiting case."""

import math

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, logsigmoid, normalize

from oracles import (
    block_householder,
    comba,
    decaying_fast_weights,
    delta_scan,
    dijiang,
    gate_loop,
    gated_retention,
    gdn2,
    hgrn,
    hyena,
    kda,
    lifted,
    lightning,
    log_linear,
    lru,
    mamba,
    mesa,
    mlstm,
    multi_head_delta,
    rebased,
    rg_lru,
    rotary,
    rwkv4,
    rwkv7,
    s4,
    slstm,
    titans,
    titans_blocks,
    ttt,
)
from oracles.inputs import wave
from oracles.released import NUMBERS

T, K, V = 5, 3, 2
DOUBLE = torch.float64
Q, KEY, VALUE = QKV = wave(1, T, K), wave(2, T, K), wave(3, T, V)
ALPHA, BETA = torch.sigmoid(wave(4, T)), torch.sigmoid(wave(5, T))
ONE, ZERO = torch.ones(T, dtype=DOUBLE), torch.zeros(T, dtype=DOUBLE)
RIDGE = 0.5 + torch.sigmoid(wave(22, K))
TRIANGLE = torch.ones(T, T).tril()


def same(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def apart(a, b, least=1e-3):
    """The inputs tell a from b: without this an agreement elsewhere would prove little."""
    assert (a - b).abs().max() > least


def heads(gate, size):
    """One number of a token for so many channels."""
    return gate[:, None].expand(T, size)


# ---- inputs -------------------------------------------------------------------------------------

MLSTM = wave(1, T, K), wave(2, T, K), wave(8, T, K), 2 * wave(6, T), 3 * wave(7, T)
CAPPED = Q, KEY, VALUE, mlstm.soft_cap(9 * MLSTM[3], 15), mlstm.soft_cap(9 * MLSTM[4], 15)
CELLS = wave(9, T, 4, 2, 2).unbind(1)
R = {name: wave(10, 2, 4, 2, 2)[:, i] for i, name in enumerate("ifzo")}
TITANS = tuple(torch.sigmoid(wave(seed, T)) for seed in (100, 101, 102))
MAMBA = (
    wave(84, T, 3), wave(83, T, 3), wave(80, T, 2), 2 * torch.sigmoid(wave(81, T, 2)),
    wave(82, 2, 3), wave(85, 2),
)  # fmt: skip
RWKV4 = 2 * wave(23, T, K), wave(24, T, K), wave(25, K).exp(), wave(26, K)
HGRN = wave(27, T, K), wave(28, T, K), 0.5 * torch.sigmoid(wave(29, K))
HYENA = tuple(wave(51 + i, T, K) for i in range(4))
LOG_A = -torch.sigmoid(wave(39, T, K))
LOG_LINEAR = (
    wave(44, 13, K), wave(45, 13, K), wave(46, 13, V), -torch.sigmoid(wave(47, 13)),
    torch.sigmoid(wave(48, 13, 5)),
)  # fmt: skip
DIJIANG = tuple(wave(seed, 2, T, size)[1] for seed, size in ((57, 4), (58, 4), (59, V)))


def titans_in_pytorch(residual):
    """The MLP memory of titans-pytorch."""
    D, n, heads_up = 3, 6, 3 if residual else 2
    x = wave(60, n, D)

    def parameter(index, *shape):
        return 0.6 * wave(61 + heads_up + index, *shape)

    # Order: the memory's weights, q, k, v, then weight and bias of step, momentum, decay.
    weights = {} if not residual else {"gamma": parameter(0, D)}
    first = len(weights)
    weights |= {"W1": parameter(first, D, 2 * D), "W2": parameter(first + 1, 2 * D, D)}
    q, k, v = (x @ parameter(first + 2 + i, D, D).T for i in range(3))
    theta, eta, alpha = (
        torch.sigmoid(x @ parameter(first + 5 + 2 * i, D) + parameter(first + 6 + 2 * i, 1))
        for i in range(3)
    )

    def memory(w, x):
        y = gelu(x @ w["W1"]) @ w["W2"]
        return x + layer_norm(y, y.shape) * (w["gamma"] + 1) if residual else y

    return titans.recurrence(memory, weights, q, k, v, theta / D, eta, alpha, mini_batch=2)[0]


def ttt_inputs(width):
    D, n, b = 4, 6, 3
    weights = {"W1": 0.4 * wave(18, D, width or D), "b1": 0.1 * wave(19, width or D)}
    if width:
        weights |= {"W2": 0.4 * wave(20, width, D), "b2": 0.1 * wave(21, D)}
    scale = ttt.default_scale(b) + 0.1 * wave(15, b)
    norm = 1 + 0.3 * wave(16, D), 0.2 * wave(17, D)
    tokens = (wave(seed, n, D) for seed in (11, 12, 13))
    return weights, (*tokens, torch.sigmoid(wave(14, n)), scale, *norm)


def ttt_outputs(network, width):
    weights, rest = ttt_inputs(width)
    return ttt.recurrence(network, weights, *rest)[0]


def s4_kernel():
    C = torch.complex(wave(49, 4), wave(50, 4))
    dA, dB = s4.discretise(s4.lin(8), torch.ones(4, dtype=torch.complex128), 0.05)
    return s4.kernel(dA, dB, C, 5), dA, dB, C


def rg_lru_outputs():
    x = wave(35, T, 4)
    gates = (rg_lru.block_diagonal(x, wave(s, 2, 2, 2), wave(s + 2, 2, 2)) for s in (32, 31))
    starts = torch.tensor([True, False, False, True, False])
    return rg_lru.recurrence(x, *gates, wave(30, 4), starts)[0]


def rwkv7_outputs():
    w, a = torch.exp(-torch.sigmoid(wave(36, T, K))), torch.sigmoid(wave(37, T, K))
    kappa = normalize(wave(38, T, K), dim=-1)
    return rwkv7.recurrence(Q, w, KEY, VALUE, kappa, a)[0]


def dijiang_outputs():
    phi = (dijiang.released_features(x, wave(56, 4)) for x in DIJIANG[:2])
    decay = dijiang.released_decay(2)[1]
    return dijiang.released_recurrence(*phi, DIJIANG[2], decay)[0]


def gdn2_outputs():
    erase, write = torch.sigmoid(wave(40, T, K)), torch.sigmoid(wave(41, T, V))
    return gdn2.recurrence(*QKV, LOG_A, erase, write)[0]


# ---- the authors' numbers -----------------------------------------------------------------------

RELEASED = {
    "comba": lambda: comba.recurrence(*QKV, ALPHA, BETA, 0.7 * BETA)[0],
    "comba state": lambda: comba.recurrence(*QKV, ALPHA, BETA, 0.7 * BETA)[1],
    "mlstm step": lambda: mlstm.recurrence(*MLSTM, eps=1e-6)[0],
    "mlstm parallel": lambda: mlstm.parallel(*MLSTM, eps=1e-6),
    "mlstm 7b": lambda: mlstm.recurrence(*CAPPED, eps=1e-6)[0],
    "slstm": lambda: slstm.recurrence(*CELLS, R)[0].flatten(1),
    "slopes": lambda: lightning.released_slopes(6, 3, 8),
    "transformers slopes": lambda: lightning.transformers_slopes(6, 3, 8),
    "titans": lambda: titans_in_pytorch(False),
    "titans residual": lambda: titans_in_pytorch(True),
    "ttt linear": lambda: ttt_outputs(ttt.linear, None),
    "ttt mlp": lambda: ttt_outputs(ttt.mlp, 16),
    "mesa": lambda: mesa.recurrence(Q, KEY, wave(8, T, K), ALPHA, BETA, RIDGE)[0],
    "mamba signed": lambda: mamba.recurrence(*MAMBA)[0],
    "s4d kernel": lambda: s4_kernel()[0],
    "legs imaginary": lambda: -s4.legs(8).imag.flip(0),
    "rwkv4": lambda: rwkv4.recurrence(*RWKV4)[0],
    "rwkv7": rwkv7_outputs,
    "hgrn": lambda: hgrn.recurrence(*HGRN)[0],
    "rglru": rg_lru_outputs,
    "hyena": lambda: hyena.hyena(*HYENA, wave(55, K)),
    "rebased default": lambda: rebased.recurrence(*QKV)[0],
    "dijiang": dijiang_outputs,
    "kda": lambda: kda.recurrence(*QKV, LOG_A, BETA)[0],
    "kda gate": lambda: kda.bounded_log_decay(wave(42, T, K), 0.3, wave(43, K)),
    "gdn2": gdn2_outputs,
    "log linear": lambda: log_linear.recurrence(*LOG_LINEAR)[0][-4:],
}
# The release of TTT rounds the derivative of its GELU to eight digits.
DIGITS = {"ttt mlp": 1e-9, "rwkv4": 1e-7, "legs imaginary": 1e-10}


@pytest.mark.parametrize("name", RELEASED)
def test_as_released(name):
    expected = torch.tensor(NUMBERS[name], dtype=DOUBLE)
    same(RELEASED[name](), expected, DIGITS.get(name, 1e-11))


# ---- two ways to the same numbers ---------------------------------------------------------------


def comba_with_feedback_key():
    pairs = (
        comba.recurrence(*QKV, ALPHA, BETA, 0.4 * BETA, d=0.3),
        comba.with_feedback_key(Q - 0.3 * KEY, KEY, VALUE, 0.4 * KEY, ALPHA, BETA),
    )
    return [torch.cat([o.flatten(), S.flatten()]) for o, S in pairs]


def slstm_without_recurrence():
    """A weighted mean."""
    i, f, z, o = CELLS
    h, _ = slstm.recurrence(*CELLS, {name: 0 * block for name, block in R.items()})
    decay = logsigmoid(f).cumsum(0)
    weights = torch.exp(decay[:, None] - decay[None] + i[None]) * TRIANGLE[:, :, None, None]
    return h, torch.sigmoid(o) * (weights * torch.tanh(z)[None]).sum(1) / weights.sum(1)


def lightning_as_masked_attention():
    t = torch.arange(T, dtype=DOUBLE)
    scores = torch.tril(Q @ KEY.T * torch.exp(-0.3 * (t[:, None] - t)))
    return lightning.recurrence(*QKV, 0.3)[0], scores @ VALUE


def titans_mlp_of_two_layers():
    x, first, second = wave(1, K), wave(2, 4, K), wave(3, V, 4)
    two = titans.mlp({"W1": first, "W2": second}, x)
    return two, second @ torch.nn.functional.silu(first @ x)


def rotary_as_a_complex_product(interleaved):
    positions, x = torch.tensor([0, 3, 1000, 1_000_000]), wave(130, 4, 6)
    theta = rotary.frequencies(6)
    turn = torch.polar(torch.ones(4, 3, dtype=DOUBLE), positions[:, None] * theta)
    if interleaved:
        product = torch.view_as_real(torch.view_as_complex(x.reshape(4, 3, 2)) * turn).flatten(1)
    else:
        product = torch.complex(x[:, :3], x[:, 3:]) * turn
        product = torch.cat([product.real, product.imag], 1)
    return rotary.rotate(x, positions, theta, interleaved=interleaved), product


FAST = torch.sigmoid(wave(140, T, K)), torch.sigmoid(wave(141, T, V))


def fast_weights_continued():
    parts = [tuple(x[part] for x in (*QKV, *FAST)) for part in (slice(2), slice(2, None))]
    _, middle = decaying_fast_weights.recurrence(*parts[0])
    _, end = decaying_fast_weights.recurrence(*parts[1], middle)
    return end, decaying_fast_weights.recurrence(*QKV, *FAST)[1]


def fast_weights_with_one_decay(a, b):
    o, _ = decaying_fast_weights.recurrence(*QKV, heads(a, K), heads(b, V))
    return o, gated_retention.parallel(*QKV, ALPHA)


def s4_convolution():
    taps, dA, dB, C = s4_kernel()
    u = wave(150, 5)
    return s4.recurrence(u, dA, dB, C, 0.4)[0], s4.convolution(u, taps, 0.4)


def s4_dense():
    """The dense map in its eigenbasis."""
    A, B = s4.hippo_legs(6)
    P = torch.sqrt(torch.arange(6, dtype=DOUBLE) + 0.5)
    normal, C, u = A + torch.outer(P, P), wave(151, 6), wave(152, 20)
    values, vectors = torch.linalg.eig(normal)
    half = values.imag > 0
    B_, C_ = torch.linalg.inv(vectors) @ B.to(values.dtype), C.to(values.dtype) @ vectors
    dA, dB = s4.discretise(values[half], B_[half], 0.1, bilinear=True)
    return s4.recurrence(u, dA, dB, C_[half], 0)[0], s4.dense_recurrence(u, normal, B, C, 0.1)


def s4_held_input():
    """x(t) = (exp(A t) - 1) / A B u for a constant u."""
    A, B = s4.lin(8), torch.ones(4, dtype=torch.complex128)
    dA, dB = s4.discretise(A, B, 0.05)
    _, x = s4.recurrence(torch.ones(20, dtype=DOUBLE), dA, dB, B, 0)
    return torch.view_as_real(x), torch.view_as_real((torch.exp(A) - 1) / A * B)


def rwkv7_as_delta_net():
    """No decay, a = beta, key = beta kappa."""
    one = torch.ones(T, K, dtype=DOUBLE)
    kappa, _ = rwkv7.keys(KEY, one[0], one[0], 0.5 * one)
    o, _ = rwkv7.recurrence(Q, one, 0.5 * kappa, VALUE, kappa, 0.5 * one)
    return o, delta_scan.recurrence(Q, kappa, VALUE, 0.5 * ONE)[0]


def hgrn_at_angle_zero():
    c, *rest = HGRN
    z = torch.complex(c, torch.zeros_like(c))
    return hgrn.recurrence(z, *rest, torch.zeros(K, dtype=DOUBLE))[0].real, hgrn.recurrence(*HGRN)[
        0
    ]


def hgrn_in_a_turning_frame():
    c, *rest = HGRN
    z, theta = torch.complex(c, torch.zeros_like(c)), hgrn.first_angles(K)
    turned, _ = hgrn.recurrence(z, *rest, theta)
    turn = torch.polar(torch.ones(T, K, dtype=DOUBLE), torch.arange(T)[:, None] * theta)
    parts = (hgrn.recurrence(x, *rest)[0] for x in ((z / turn).real, (z / turn).imag))
    return torch.view_as_real(turned), torch.view_as_real(torch.complex(*parts) * turn)


def lru_as_a_convolution():
    N, M = 3, 2
    nu, theta, D, u = wave(170, N), wave(171, N), wave(176, M), wave(177, T, M)
    B, C = (
        torch.complex(wave(s, *shape), wave(s + 1, *shape))
        for s, shape in ((172, (N, M)), (174, (M, N)))
    )
    gamma, eigen = lru.first_gamma(nu), lru.eigenvalues(nu, theta)
    same(gamma.square() + eigen.abs().square(), torch.ones(N, dtype=DOUBLE))
    taps = [(C @ torch.diag(eigen**lag * gamma) @ B) for lag in range(T)]
    y = [D * u[t] + sum((taps[t - j] @ u[j].to(B.dtype)).real for j in range(t + 1))
         for t in range(T)]  # fmt: skip
    return lru.recurrence(u, nu, theta, gamma, B, C, D)[0], torch.stack(y)


def rg_lru_sign():
    """The parameter has the sign of minus lambda."""
    x, zero = torch.ones(2, 1, dtype=DOUBLE), torch.zeros(2, 1, dtype=DOUBLE)
    parameter = torch.tensor([0.3], dtype=DOUBLE)
    a = torch.sigmoid(-parameter) ** (8 * 0.5)
    first = torch.sqrt(1 - a**2) * 0.5
    return rg_lru.recurrence(x, zero, zero, parameter)[0], torch.stack([first, a * first + first])


TURNING = gate_loop.transition(wave(180, T, K), 3 * wave(181, T, K))


def gate_loop_of_real_gates():
    real = heads(torch.complex(ALPHA, torch.zeros_like(ALPHA)), K)
    return gate_loop.recurrence(*QKV, real)[0], gated_retention.recurrence(*QKV, ALPHA)[0]


def gate_loop_cell():
    """The released one is HGRN's without a bound."""
    x, i, o = (wave(s, T, K) for s in (182, 183, 184))
    h, _ = hgrn.recurrence(torch.tanh(x), -i, torch.zeros(K, dtype=DOUBLE))
    return gate_loop.released(x, i, o)[0], torch.sigmoid(o) * torch.tanh(h)


FILTER = wave(190, T)
HYENA_HEADS = *HYENA[:2], wave(53, T, V)


def multi_head_hyena():
    q, k, v = HYENA_HEADS
    age = (torch.arange(T)[:, None] - torch.arange(T)).clamp_min(0)
    return hyena.multi_head(q, k, v, FILTER), torch.tril(FILTER[age] * (q @ k.T)) @ v


def hyena_heads_of_one_channel():
    one = [x[:, :1] for x in HYENA_HEADS]
    return hyena.multi_head(*one, FILTER, 0.2), hyena.hyena(*one, FILTER[:, None], 0.2)


X4 = wave(200, T, 4)


def rebased_transform():
    z = (X4 - X4.mean(1, keepdim=True)) / (X4.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    return rebased.transform(X4, wave(201, 4), wave(202, 4)), z * wave(201, 4) + wave(202, 4)


def rebased_features():
    y = rebased_transform()[0]
    apart(y.square() @ X4.square().T / 4, (y @ X4.T).square() / 4)
    return rebased.features(y) @ rebased.features(X4).T, (y @ X4.T).square() / 4


def dijiang_as_printed():
    x, t, weight, C = wave(57, T, 4), wave(56, 4), torch.sigmoid(wave(203, 4)), dijiang.dct(4)
    same(C @ C.T, torch.eye(4, dtype=DOUBLE))
    phi = dijiang.features(x, t, weight)
    same(phi[2], weight * torch.exp(torch.diag(t) @ C @ x[2]))
    scores = torch.tril(phi @ phi.T)
    expected = scores @ wave(59, T, V) / scores.sum(1, keepdim=True)
    return dijiang.recurrence(phi, phi, wave(59, T, V))[0], expected


def kda_gates_far_out():
    far = kda.bounded_log_decay(torch.tensor([-100.0, 100.0], dtype=DOUBLE), bound=-3.0)
    free = kda.log_decay(torch.tensor([0.0], dtype=DOUBLE), A_log=math.log(2))
    return torch.cat([far, free]), torch.tensor([0, -3, -2 * math.log(2)], dtype=DOUBLE)


GAMMA = gated_retention.gate(wave(210, T))
SAME = {
    "comba with a feedback key": comba_with_feedback_key,
    "comba without decay is DeltaNet": lambda: (
        comba.recurrence(*QKV, ONE, BETA, BETA)[0], delta_scan.recurrence(*QKV, BETA)[0],
    ),
    **{
        f"mLSTM, stabilised from {m}": lambda m=m: (
            mlstm.recurrence(*MLSTM, m=m)[0], mlstm.unstabilised(*MLSTM)[0],
        )
        for m in (0.0, -5.0, 4.0, -math.inf)
    },
    "mLSTM, parallel": lambda: (mlstm.parallel(*MLSTM), mlstm.unstabilised(*MLSTM)[0]),
    "sLSTM without recurrence": slstm_without_recurrence,
    "slopes of one layer": lambda: (
        lightning.released_slopes(4, 0, 1), (1 + 1e-5) * 4.0 ** -torch.arange(1.0, 5).double(),
    ),
    "lightning is masked attention": lightning_as_masked_attention,
    "Titans without gates": lambda: (
        titans.linear_recurrence(torch.zeros(V, K).double(), *QKV, BETA / 2, ZERO, ZERO)[0],
        delta_scan.recurrence(*QKV, BETA)[0],
    ),
    "Titans' MLP of one layer": lambda: (
        titans.mlp({"W1": wave(2, V, K)}, wave(1, K)),
        titans.linear({"W": wave(2, V, K)}, wave(1, K)),
    ),
    "Titans' MLP of two layers": titans_mlp_of_two_layers,
    "TTT, dual": lambda: (
        ttt_outputs(ttt.linear, None), ttt.linear_dual(ttt_inputs(None)[0], *ttt_inputs(None)[1]),
    ),
    "rotary": lambda: rotary_as_a_complex_product(False),
    "rotary, interleaved": lambda: rotary_as_a_complex_product(True),
    "rotary frequencies": lambda: (
        torch.cat([rotary.frequencies(4), rotary.retnet_frequencies(4)]),
        torch.tensor([1.0, 0.01, 1.0, 1e-4], dtype=DOUBLE),
    ),
    **{
        f"fast weights, {form.__name__}": lambda form=form: (
            decaying_fast_weights.recurrence(*QKV, *FAST)[0], form(*QKV, *FAST),
        )
        for form in (decaying_fast_weights.masked_products, decaying_fast_weights.factored)
    },
    "fast weights, continued": fast_weights_continued,
    "fast weights of one decay of keys": lambda: fast_weights_with_one_decay(ALPHA, ONE),
    "fast weights of one decay of values": lambda: fast_weights_with_one_decay(ONE, ALPHA),
    "S4, convolution": s4_convolution,
    "S4, held input": s4_held_input,
    "legs, real parts": lambda: (s4.legs(8).real, torch.full((4,), -0.5, dtype=DOUBLE)),
    "lin": lambda: (s4.lin(8).imag, torch.arange(4, dtype=DOUBLE) * math.pi),
    "RWKV-4, by definition": lambda: (
        rwkv4.recurrence(*RWKV4)[0], rwkv4.by_definition(*RWKV4),
    ),
    "RWKV-7 as DeltaNet": rwkv7_as_delta_net,
    "RWKV-7, bonus": lambda: (
        rwkv7.bonus(Q, KEY, VALUE, torch.ones(K, dtype=DOUBLE)),
        (Q * KEY).sum(1, keepdim=True) * VALUE,
    ),
    "HGRN at angle zero": hgrn_at_angle_zero,
    "HGRN in a turning frame": hgrn_in_a_turning_frame,
    "LRU is a convolution": lru_as_a_convolution,
    "RG-LRU, sign": rg_lru_sign,
    "GateLoop, parallel": lambda: (
        gate_loop.recurrence(*QKV, TURNING)[0], gate_loop.parallel(*QKV, TURNING),
    ),
    "GateLoop of real gates": gate_loop_of_real_gates,
    "GateLoop, cell": gate_loop_cell,
    "multi-head Hyena": multi_head_hyena,
    "Hyena's heads of one channel": hyena_heads_of_one_channel,
    "Hyena with a geometric filter": lambda: (
        hyena.multi_head(*HYENA_HEADS, torch.exp(-0.3 * torch.arange(T, dtype=DOUBLE))),
        lightning.recurrence(*HYENA_HEADS, 0.3)[0],
    ),
    "ReBased, parallel": lambda: (rebased.recurrence(*QKV)[0], rebased.parallel(*QKV)),
    "ReBased, transform": rebased_transform,
    "ReBased, features": rebased_features,
    "DiJiang as printed": dijiang_as_printed,
    "gated retention, parallel": lambda: (
        gated_retention.recurrence(*QKV, GAMMA)[0], gated_retention.parallel(*QKV, GAMMA),
    ),
    "gated retention, gate": lambda: (GAMMA**16, torch.sigmoid(wave(210, T))),
    "GDN-2 of one strength": lambda: (
        gdn2.recurrence(*QKV, LOG_A, heads(BETA, K), heads(BETA, V))[0],
        kda.recurrence(*QKV, LOG_A, BETA)[0],
    ),
    "KDA, gates far out": kda_gates_far_out,
    "log-linear, by definition": lambda: (
        log_linear.recurrence(*LOG_LINEAR)[0], log_linear.by_definition(*LOG_LINEAR),
    ),
    "log-linear of equal scales": lambda: (
        log_linear.recurrence(*LOG_LINEAR[:4], torch.ones_like(LOG_LINEAR[4]))[0],
        gated_retention.recurrence(*LOG_LINEAR[:3], LOG_LINEAR[3].exp())[0],
    ),
}  # fmt: skip
# Two dense roots, and exponentials of 900 that cancel.
ROUNDED = {
    "S4, dense": (s4_dense, 1e-10),
    "RWKV-4, shifted": (
        lambda: (
            rwkv4.recurrence(RWKV4[0] + 900, *RWKV4[1:])[0],
            rwkv4.recurrence(*RWKV4)[0],
        ),
        1e-11,
    ),
}
# For a power of two the rules of slopes are one but for 1e-5.
ROUNDED["slopes of 8"] = (
    lambda: (lightning.released_slopes(8, 3, 8), lightning.transformers_slopes(8, 3, 8)), 1e-6,
)  # fmt: skip


@pytest.mark.parametrize("name", [*SAME, *ROUNDED])
def test_two_ways_are_the_same(name):
    make, tolerance = ROUNDED[name] if name in ROUNDED else (SAME[name], 1e-12)
    same(*make(), tolerance)


APART = {
    "Comba erases the undecayed state": lambda: (
        comba.recurrence(*QKV, ALPHA, BETA, BETA)[0],
        kda.recurrence(*QKV, heads(ALPHA.log(), K), BETA)[0],
    ),
    "slopes of the text": lambda: (
        lightning.released_slopes(8, 3, 8), lightning.text_slopes(8, 3, 8),
    ),
    "signed Mamba": lambda: (
        mamba.recurrence(*MAMBA)[0], mamba.recurrence(*MAMBA, signed=False)[0],
    ),
    # With decay the recursion forgets the ridge.
    "Mesa's recursion with decay": lambda: (
        mesa.sherman_morrison(*QKV, BETA, RIDGE, gamma=ALPHA)[0],
        mesa.recurrence(*QKV, ALPHA, BETA, RIDGE)[0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_these_are_not_the_same(name):
    apart(*APART[name]())


# ---- what takes more than two numbers -----------------------------------------------------------


def test_comba_released_layer_loses_b_in_its_feedback_key():
    q_, k_, p_ = comba.released_inputs(Q, KEY, b_logit=1.0, d=0.02)
    same(p_, k_, 1e-4)
    apart(q_, comba.released_inputs(Q, KEY, b_logit=-3.0, d=0.02)[0])


@pytest.mark.parametrize("mini_batch", [1, 2, 5])
def test_titans_linear_memory_by_autograd_and_in_closed_form(mini_batch):
    W = wave(99, V, K)
    o, M, S = titans.recurrence(titans.linear, {"W": W}, *QKV, *TITANS, mini_batch)
    for found, expected in zip(
        (o, M["W"], S["W"]), titans.linear_recurrence(W, *QKV, *TITANS, mini_batch), strict=True
    ):
        same(found, expected)


def test_titans_first_mini_batch_unrolled():
    """Eq. 16 with the momentum: M_t = b_t M_0 - sum_i (sum_{j>=i} b_t/b_j m_j/m_i) theta_i g_i."""
    theta, eta, alpha = TITANS
    W = wave(99, V, K)
    o, _, _ = titans.linear_recurrence(W, *QKV, theta, eta, alpha, mini_batch=T)
    b, m = (1 - alpha).cumprod(0), eta.cumprod(0)
    for t in range(T):
        M = b[t] * W
        for i in range(t + 1):
            gradient = 2 * torch.outer(W @ KEY[i] - VALUE[i], KEY[i])
            M = M - sum(b[t] / b[j] * m[j] / m[i] for j in range(i, t + 1)) * theta[i] * gradient
        same(o[t], M @ Q[t])


class Recorder:
    """A memory that sums what was written."""

    def __init__(self, width):
        self.state = torch.zeros(width, dtype=DOUBLE)

    def write(self, tokens):
        outputs = self.state + tokens.cumsum(0)
        self.state = outputs[-1]
        return outputs

    def read(self, tokens):
        return tokens + self.state


def test_titans_blocks():
    D, n, segment, persistent = 4, 6, 3, wave(120, 2, 4)
    x, projections = wave(121, n, D), tuple(wave(122 + i, D, D) for i in range(3))
    window, full = (titans_blocks.softmax_attention(size, projections) for size in (2, None))
    gate = titans_blocks.sigmoid_gate(wave(126, D), wave(127, D))

    prefixed = torch.cat([persistent, x])
    summed = prefixed.cumsum(0)
    o = titans_blocks.as_gate(x, persistent, Recorder(D), window, gate)
    same(o, gate(window(prefixed, 2), summed)[2:])
    same(titans_blocks.as_layer(x, persistent, Recorder(D), window), window(summed, 0)[2:])
    changed = x.clone()
    changed[4] += 1
    other = titans_blocks.as_gate(changed, persistent, Recorder(D), window, gate)
    same(o[:4], other[:4])
    apart(o[4:], other[4:])

    o = titans_blocks.as_context(x, persistent, Recorder(D), full, gate, segment)
    state = torch.zeros(D, dtype=DOUBLE)
    for s in range(0, n, segment):
        tokens = x[s : s + segment]
        y = full(torch.cat([persistent, tokens + state, tokens]), 2 + segment)[2 + segment :]
        state = state + y.sum(0)
        same(o[s : s + segment], gate(y, y + state))


def test_mesa_recursions():
    o, (H, _) = mesa.recurrence(*QKV, ONE, BETA, RIDGE)
    o2, (P, _) = mesa.sherman_morrison(*QKV, BETA, RIDGE)
    same(o, o2)
    same(P, torch.linalg.inv(H + torch.diag(RIDGE)))
    # With decay it solves with a ridge shrunk by every gamma.
    o3, _ = mesa.sherman_morrison(*QKV, BETA, RIDGE, gamma=ALPHA)
    for t in range(T):
        first = (x[: t + 1] for x in QKV)
        shrunk, _ = mesa.recurrence(*first, ALPHA, BETA, RIDGE * ALPHA[: t + 1].prod())
        same(o3[t], shrunk[-1])


def test_mesa_is_the_least_squares_solution():
    _, (H, G) = mesa.recurrence(*QKV, ONE, BETA, RIDGE)
    S = torch.linalg.solve(H + torch.diag(RIDGE), G, left=False).requires_grad_()
    loss = (BETA * (KEY @ S.T - VALUE).square().sum(1)).sum() + (S.square() * RIDGE).sum()
    same(torch.autograd.grad(loss, S)[0], torch.zeros_like(S))


def test_rotary_depends_on_distance_only():
    theta = rotary.frequencies(4)
    q, k = wave(131, 1, 6), wave(132, 1, 6)

    def score(t, j):
        turned = (rotary.rotate(x, torch.tensor([p]), theta) for x, p in ((q, t), (k, j)))
        return math.prod(turned).sum()

    same(score(7, 3), score(1007, 1003), 1e-11)
    apart(score(7, 3), score(7, 4))
    theta = rotary.frequencies(128)
    error = (1e6 * theta).sin() - (theta.float() * 1e6).sin().double()
    assert error.abs().max() > 0.005


def test_ranges():
    delta, A_log = torch.logspace(-6, 3, 50, dtype=DOUBLE), wave(82, 50, 3)
    signed = mamba.transition(delta, A_log, signed=True)
    assert -1 <= signed.min() < -0.9
    assert 0.99 < signed.max() <= 1
    same((signed + 1) / 2, mamba.transition(delta, A_log, signed=False))
    # S4D-Inv follows the largest frequency of LegS; S4D-Lin is the Fourier series'.
    top = [float(start(64).imag.max()) for start in (s4.inv, s4.legs)]
    assert top[0] == pytest.approx(top[1], rel=0.02)
    bounds = hgrn.lower_bounds(wave(160, 4, K))
    same(bounds[0], torch.zeros_like(bounds[0]))
    assert (bounds.diff(dim=0) > 0).all()
    assert (bounds < 1).all()
    slowest, fastest = rwkv7.decay(torch.tensor([-50.0, 50.0], dtype=DOUBLE)).tolist()
    assert (slowest, fastest) == pytest.approx((1, 0.5452), abs=1e-4)
    one = torch.ones(T, K, dtype=DOUBLE)
    kappa, key = rwkv7.keys(KEY, one[0], one[0], 0.5 * one)
    same(kappa.norm(dim=-1), ONE)
    same(key, 0.5 * KEY)


def test_block_householder():
    q, k, v = wave(220, T, 6), wave(221, T, 6), wave(222, T, V)
    beta = torch.sigmoid(wave(223, T, 2))
    o, S = block_householder.recurrence(q, k, v, beta)
    blocks = [slice(0, 3), slice(3, 6)]
    alone = [delta_scan.recurrence(q[:, x], k[:, x], v, beta[:, g]) for g, x in enumerate(blocks)]
    same(o, alone[0][0] + alone[1][0])
    same(S, torch.cat([state for _, state in alone], 1))
    one_block, _ = block_householder.recurrence(q, k, v, beta[:, :1])
    same(one_block, delta_scan.recurrence(q, k, v, beta[:, 0])[0])
    apart(one_block, o)


@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_delta_net_by_scan(length):
    q, k, v = wave(230, length, K), wave(231, length, K), wave(232, length, V)
    given = q, k, v, 2 * torch.sigmoid(wave(233, length)), wave(234, V, K)
    for found, expected in zip(delta_scan.recurrence(*given), delta_scan.scan(*given), strict=True):
        same(found, expected)


N = 3
SLOTS = wave(240, T, N, K), wave(241, T, N, K), wave(242, T, N, V), torch.sigmoid(wave(243, T, N))


def test_multi_head_delta_variants():
    q, k, v, eta = SLOTS
    one = slice(None), slice(0, 1)

    def slot(i, *given):
        return delta_scan.recurrence(*(x[:, min(i, x.shape[1] - 1)] for x in given))[0]

    variants = {
        "multi-head": (q, k, v, eta),
        "multi-KV": (q[one], k, v, eta),
        "multi-value": (q[one], k[one], v, eta[one]),
        "multi-key": (q[one], k, v[one], eta),
        "multi-query": (q, k[one], v[one], eta[one]),
    }
    for name, inputs in variants.items():
        y, W = multi_head_delta.recurrence(*inputs)
        assert len(W) == (1 if name == "multi-query" else N)
        same(y, torch.stack([slot(i, *inputs) for i in range(N)], 1))

    # Summed, two of them are one DeltaNet: the blog's read-out does not tell them apart.
    y, _ = multi_head_delta.recurrence(*variants["multi-value"])
    same(y.sum(1), delta_scan.recurrence(q[:, 0], k[:, 0], v.sum(1), eta[:, 0])[0])
    y, _ = multi_head_delta.recurrence(*variants["multi-query"])
    same(y.sum(1), delta_scan.recurrence(q.sum(1), k[:, 0], v[:, 0], eta[:, 0])[0])


def test_delta_product_is_delta_net_on_the_expanded_sequence():
    q, (_, k, v, eta) = wave(240, T, K), SLOTS
    y, _ = multi_head_delta.delta_product(q, k, v, eta)
    expanded = q.repeat_interleave(N, 0), k.flatten(0, 1), v.flatten(0, 1), eta.flatten()
    same(y, delta_scan.recurrence(*expanded)[0][N - 1 :: N])
    # Mutually orthogonal keys within a token make it multi-KV, summed; others do not.
    apart(y, multi_head_delta.recurrence(q[:, None], k, v, eta)[0].sum(1))
    k = torch.eye(N, K, dtype=DOUBLE).expand(T, N, K)
    y, _ = multi_head_delta.delta_product(q, k, v, eta)
    same(y, multi_head_delta.recurrence(q[:, None], k, v, eta)[0].sum(1))


def test_lifted_to_a_batch_of_heads():
    shape = (2, T, 3)
    given = wave(250, *shape, K), wave(251, *shape, K), wave(252, *shape, V), wave(253, *shape)
    o, S = lifted.each_head(delta_scan.recurrence, *given)
    assert o.shape == (*shape, V)
    expected = delta_scan.recurrence(*(x[1, :, 2] for x in given))
    same(o[1, :, 2], expected[0])
    same(S[1, 2], expected[1])


def test_oracles_are_differentiable():
    """Colleagues take gradients of them, through the inner gradients too."""
    weights, (q, k, v, *rest) = ttt_inputs(None)
    memory = {"W": wave(99, V, K)}
    for run, leaves in (
        (lambda *x: ttt.recurrence(ttt.linear, weights, *x, *rest)[0], (q, k, v)),
        (lambda *x: titans.recurrence(titans.linear, memory, *x, *TITANS, 2)[0], QKV),
    ):
        given = tuple(x.clone().requires_grad_() for x in leaves)
        assert torch.autograd.gradcheck(run, given, fast_mode=True)
