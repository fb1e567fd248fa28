"""Each oracle against its authors' numbers, a second form of the same maths, or a limiting case."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, logsigmoid

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


def released(name: str) -> Tensor:
    return torch.tensor(NUMBERS[name], dtype=torch.float64)


def same(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def apart(a: Tensor, b: Tensor, least: float = 1e-3) -> None:
    """The inputs tell a from b: without this an agreement elsewhere would prove little."""
    assert (a - b).abs().max() > least


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return wave(1, T, K), wave(2, T, K), wave(3, T, V)


@pytest.fixture
def gates() -> tuple[Tensor, Tensor]:
    return torch.sigmoid(wave(4, T)), torch.sigmoid(wave(5, T))


# Comba


def test_comba_erases_the_undecayed_state_as_the_released_chunk(qkv, gates):
    q, k, v = qkv
    alpha, beta = gates
    o, S = comba.recurrence(q, k, v, alpha, beta, 0.7 * beta)
    same(o, released("comba"), 1e-11)
    same(S, released("comba state"), 1e-11)
    decayed_first, _ = kda.recurrence(q, k, v, alpha.log()[:, None].expand(-1, K), beta)
    apart(comba.recurrence(q, k, v, alpha, beta, beta)[0], decayed_first)


def test_comba_feedback_key_and_output_correction(qkv, gates):
    q, k, v = qkv
    alpha, beta = gates
    o, S = comba.recurrence(q, k, v, alpha, beta, 0.4 * beta, d=0.3)
    o2, S2 = comba.with_feedback_key(q - 0.3 * k, k, v, 0.4 * k, alpha, beta)
    same(o, o2)
    same(S, S2)


def test_comba_without_decay_is_delta_net(qkv, gates):
    q, k, v = qkv
    _, beta = gates
    o, _ = comba.recurrence(q, k, v, torch.ones(T, dtype=torch.float64), beta, beta)
    same(o, delta_scan.recurrence(q, k, v, beta)[0])


def test_comba_released_layer_loses_b_in_its_feedback_key(qkv):
    q, k, _ = qkv
    q_, k_, p_ = comba.released_inputs(q, k, b_logit=1.0, d=0.02)
    same(p_, k_, 1e-4)
    apart(q_, comba.released_inputs(q, k, b_logit=-3.0, d=0.02)[0])


# mLSTM


def mlstm_inputs() -> tuple[Tensor, ...]:
    return wave(1, T, K), wave(2, T, K), wave(8, T, K), 2 * wave(6, T), 3 * wave(7, T)


def test_mlstm_step_and_parallel_form_as_released():
    same(mlstm.recurrence(*mlstm_inputs(), eps=1e-6)[0], released("mlstm step"), 1e-11)
    same(mlstm.parallel(*mlstm_inputs(), eps=1e-6), released("mlstm parallel"), 1e-11)


def test_mlstm_7b_caps_both_gates():
    q, k, _, i, f = mlstm_inputs()
    o, _ = mlstm.recurrence(
        q, k, wave(3, T, V), mlstm.soft_cap(9 * i, 15), mlstm.soft_cap(9 * f, 15), eps=1e-6
    )
    same(o, released("mlstm 7b"), 1e-11)


def test_mlstm_without_eps_does_not_depend_on_the_stabiliser():
    expected, _ = mlstm.unstabilised(*mlstm_inputs())
    same(mlstm.parallel(*mlstm_inputs()), expected)
    for m in (0.0, -5.0, 4.0, -math.inf):
        same(mlstm.recurrence(*mlstm_inputs(), m=m)[0], expected)


# sLSTM


def slstm_inputs(heads: int = 2, width: int = 2) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    x = wave(9, T, 4, heads, width)
    R = wave(10, heads, 4, width, width)
    return x.unbind(1), {name: R[:, i] for i, name in enumerate("ifzo")}


def test_slstm_as_released():
    x, R = slstm_inputs()
    o, _ = slstm.recurrence(*x, R)
    same(o.flatten(1), released("slstm"), 1e-11)


def test_slstm_without_recurrence_is_a_weighted_mean():
    x, R = slstm_inputs()
    i, f, z, o = x
    h, _ = slstm.recurrence(*x, {name: 0 * block for name, block in R.items()})
    decay = logsigmoid(f).cumsum(0)
    weights = torch.exp(decay[:, None] - decay[None] + i[None])
    weights = weights * torch.ones(T, T).tril()[:, :, None, None]
    mean = (weights * torch.tanh(z)[None]).sum(1) / weights.sum(1)
    same(h, torch.sigmoid(o) * mean)


# Lightning attention


def test_lightning_slopes_as_released():
    same(lightning.released_slopes(6, 3, 8), released("slopes"), 1e-11)
    same(lightning.transformers_slopes(6, 3, 8), released("transformers slopes"), 1e-11)
    same(lightning.released_slopes(4, 0, 1), (1 + 1e-5) * 4.0 ** -torch.arange(1.0, 5).double())
    # A power of two: one rule; the text's rule is another.
    same(lightning.released_slopes(8, 3, 8), lightning.transformers_slopes(8, 3, 8), 1e-6)
    apart(lightning.released_slopes(8, 3, 8), lightning.text_slopes(8, 3, 8))


def test_lightning_is_masked_attention(qkv):
    q, k, v = qkv
    o, _ = lightning.recurrence(q, k, v, 0.3)
    t = torch.arange(T, dtype=torch.float64)
    same(o, torch.tril(q @ k.T * torch.exp(-0.3 * (t[:, None] - t))) @ v)


# Titans


def titans_gates(n: int) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.sigmoid(wave(seed, n)) for seed in (100, 101, 102))


@pytest.mark.parametrize("mini_batch", [1, 2, 5])
def test_titans_linear_memory_by_autograd_and_in_closed_form(qkv, mini_batch):
    W = wave(99, V, K)
    o, M, S = titans.recurrence(titans.linear, {"W": W}, *qkv, *titans_gates(T), mini_batch)
    o2, W2, S2 = titans.linear_recurrence(W, *qkv, *titans_gates(T), mini_batch)
    same(o, o2)
    same(M["W"], W2)
    same(S["W"], S2)


def test_titans_first_mini_batch_unrolled(qkv):
    """Eq. 16 with the momentum: M_t = b_t M_0 - sum_i (sum_{j>=i} b_t/b_j m_j/m_i) theta_i g_i."""
    q, k, v = qkv
    theta, eta, alpha = titans_gates(T)
    W = wave(99, V, K)
    o, _, _ = titans.linear_recurrence(W, q, k, v, theta, eta, alpha, mini_batch=T)
    b, m = (1 - alpha).cumprod(0), eta.cumprod(0)
    for t in range(T):
        M = b[t] * W
        for i in range(t + 1):
            gradient = 2 * torch.outer(W @ k[i] - v[i], k[i])
            M = M - sum(b[t] / b[j] * m[j] / m[i] for j in range(i, t + 1)) * theta[i] * gradient
        same(o[t], M @ q[t])


def test_titans_without_momentum_and_decay_is_delta_net(qkv, gates):
    _, beta = gates
    zero = torch.zeros(T, dtype=torch.float64)
    o, _, _ = titans.linear_recurrence(torch.zeros_like(wave(1, V, K)), *qkv, beta / 2, zero, zero)
    same(o, delta_scan.recurrence(*qkv, beta)[0])


@pytest.mark.parametrize("residual", [False, True])
def test_titans_mlp_memory_as_in_titans_pytorch(residual):
    D, n, heads_up = 3, 6, 3 if residual else 2
    x = wave(60, n, D)

    def parameter(index: int, *shape: int) -> Tensor:
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

    def memory(w: dict[str, Tensor], x: Tensor) -> Tensor:
        y = gelu(x @ w["W1"]) @ w["W2"]
        return x + layer_norm(y, y.shape) * (w["gamma"] + 1) if residual else y

    o, _, _ = titans.recurrence(memory, weights, q, k, v, theta / D, eta, alpha, mini_batch=2)
    same(o, released("titans residual" if residual else "titans"), 1e-11)


def test_titans_mlp_of_one_layer_is_linear():
    x = wave(1, K)
    same(titans.mlp({"W1": wave(2, V, K)}, x), titans.linear({"W": wave(2, V, K)}, x))
    two = titans.mlp({"W1": wave(2, 4, K), "W2": wave(3, V, 4)}, x)
    same(two, wave(3, V, 4) @ torch.nn.functional.silu(wave(2, 4, K) @ x))


class Recorder:
    """A memory that sums what was written."""

    def __init__(self, width: int) -> None:
        self.state = torch.zeros(width, dtype=torch.float64)

    def write(self, tokens: Tensor) -> Tensor:
        outputs = self.state + tokens.cumsum(0)
        self.state = outputs[-1]
        return outputs

    def read(self, tokens: Tensor) -> Tensor:
        return tokens + self.state


def test_titans_blocks():
    D, n, segment, persistent = 4, 6, 3, wave(120, 2, 4)
    x = wave(121, n, D)
    window = titans_blocks.softmax_attention(2, tuple(wave(122 + i, D, D) for i in range(3)))
    full = titans_blocks.softmax_attention(None, tuple(wave(122 + i, D, D) for i in range(3)))
    gate = titans_blocks.sigmoid_gate(wave(126, D), wave(127, D))

    prefixed = torch.cat([persistent, x])
    summed = prefixed.cumsum(0)
    same(
        titans_blocks.as_gate(x, persistent, Recorder(D), window, gate),
        gate(window(prefixed, 2), summed)[2:],
    )
    same(titans_blocks.as_layer(x, persistent, Recorder(D), window), window(summed, 0)[2:])

    o = titans_blocks.as_context(x, persistent, Recorder(D), full, gate, segment)
    state = torch.zeros(D, dtype=torch.float64)
    for s in range(0, n, segment):
        tokens = x[s : s + segment]
        y = full(torch.cat([persistent, tokens + state, tokens]), 2 + segment)[2 + segment :]
        state = state + y.sum(0)
        same(o[s : s + segment], gate(y, y + state))


def test_titans_blocks_are_causal_between_segments_and_within_the_gate():
    D = 4
    attention = titans_blocks.softmax_attention(2, tuple(wave(122 + i, D, D) for i in range(3)))
    gate = titans_blocks.sigmoid_gate(wave(126, D), wave(127, D))
    x, changed = wave(121, 6, D), wave(121, 6, D)
    changed[4] += 1
    a, b = (titans_blocks.as_gate(y, x[:1], Recorder(D), attention, gate) for y in (x, changed))
    same(a[:4], b[:4])
    apart(a[4:], b[4:])


# TTT


def ttt_inputs(width: int | None) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    D, n, b = 4, 6, 3
    weights = {"W1": 0.4 * wave(18, D, width or D), "b1": 0.1 * wave(19, width or D)}
    if width:
        weights |= {"W2": 0.4 * wave(20, width, D), "b2": 0.1 * wave(21, D)}
    scale = ttt.default_scale(b) + 0.1 * wave(15, b)
    norm = 1 + 0.3 * wave(16, D), 0.2 * wave(17, D)
    tokens = (wave(seed, n, D) for seed in (11, 12, 13))
    return weights, (*tokens, torch.sigmoid(wave(14, n)), scale, *norm)


def test_ttt_linear_as_released_and_dual():
    weights, rest = ttt_inputs(None)
    o, _ = ttt.recurrence(ttt.linear, weights, *rest)
    same(o, released("ttt linear"), 1e-11)
    same(o, ttt.linear_dual(weights, *rest))


def test_ttt_mlp_as_released():
    weights, rest = ttt_inputs(16)
    # The release rounds the derivative of its GELU to eight digits.
    same(ttt.recurrence(ttt.mlp, weights, *rest)[0], released("ttt mlp"), 1e-9)


# Mesa


def test_mesa_as_released(gates):
    alpha, beta = gates
    ridge = 0.5 + torch.sigmoid(wave(22, K))
    o, _ = mesa.recurrence(wave(1, T, K), wave(2, T, K), wave(8, T, K), alpha, beta, ridge)
    same(o, released("mesa"), 1e-11)


def test_mesa_recursions(qkv, gates):
    alpha, beta = gates
    ridge = 0.5 + torch.sigmoid(wave(22, K))
    o, (H, _) = mesa.recurrence(*qkv, torch.ones(T, dtype=torch.float64), beta, ridge)
    o2, (P, _) = mesa.sherman_morrison(*qkv, beta, ridge)
    same(o, o2)
    same(P, torch.linalg.inv(H + torch.diag(ridge)))

    # With decay the recursion forgets the ridge: it solves with a ridge shrunk by every gamma.
    o3, _ = mesa.sherman_morrison(*qkv, beta, ridge, gamma=alpha)
    apart(o3, mesa.recurrence(*qkv, alpha, beta, ridge)[0])
    q, k, v = qkv
    shrunk = [
        mesa.recurrence(
            q[: t + 1], k[: t + 1], v[: t + 1], alpha, beta, ridge * alpha[: t + 1].prod()
        )
        for t in range(T)
    ]
    same(o3, torch.stack([o[-1] for o, _ in shrunk]))


def test_mesa_is_the_least_squares_solution(qkv, gates):
    q, k, v = qkv
    _, beta = gates
    ridge = 0.5 + torch.sigmoid(wave(22, K))
    _, (H, G) = mesa.recurrence(q, k, v, torch.ones(T, dtype=torch.float64), beta, ridge)
    S = torch.linalg.solve(H + torch.diag(ridge), G, left=False)
    S.requires_grad_()
    loss = (beta * (k @ S.T - v).square().sum(1)).sum() + (S.square() * ridge).sum()
    same(torch.autograd.grad(loss, S)[0], torch.zeros_like(S))


# Rotary


def test_rotary_is_a_complex_product():
    D, positions = 6, torch.tensor([0, 3, 1000, 1_000_000])
    x, theta = wave(130, 4, D), rotary.frequencies(6)
    turn = torch.polar(torch.ones(4, 3, dtype=torch.float64), positions[:, None] * theta)
    product = torch.complex(x[:, :3], x[:, 3:]) * turn
    same(rotary.rotate(x, positions, theta), torch.cat([product.real, product.imag], 1))
    product = torch.view_as_complex(x.reshape(4, 3, 2)) * turn
    same(
        rotary.rotate(x, positions, theta, interleaved=True), torch.view_as_real(product).flatten(1)
    )


def test_rotary_depends_on_distance_only():
    theta = rotary.frequencies(4)
    q, k = wave(131, 1, 6), wave(132, 1, 6)

    def score(t: int, j: int) -> Tensor:
        turned = (rotary.rotate(x, torch.tensor([p]), theta) for x, p in ((q, t), (k, j)))
        return math.prod(turned).sum()

    same(score(7, 3), score(1007, 1003), 1e-11)
    apart(score(7, 3), score(7, 4))


def test_rotary_frequencies():
    same(rotary.frequencies(4), torch.tensor([1.0, 0.01], dtype=torch.float64))
    same(rotary.retnet_frequencies(4), torch.tensor([1.0, 1e-4], dtype=torch.float64))
    theta = rotary.frequencies(128)
    error = (1e6 * theta).sin() - (theta.float() * 1e6).sin().double()
    assert error.abs().max() > 0.005


# Decaying fast weights


def test_decaying_fast_weights_three_ways(qkv):
    a, b = torch.sigmoid(wave(140, T, K)), torch.sigmoid(wave(141, T, V))
    o, S = decaying_fast_weights.recurrence(*qkv, a, b)
    same(o, decaying_fast_weights.masked_products(*qkv, a, b))
    same(o, decaying_fast_weights.factored(*qkv, a, b))
    # Continued from the middle.
    q, k, v = qkv
    _, middle = decaying_fast_weights.recurrence(q[:2], k[:2], v[:2], a[:2], b[:2])
    _, end = decaying_fast_weights.recurrence(q[2:], k[2:], v[2:], a[2:], b[2:], middle)
    same(end, S)


def test_decaying_fast_weights_with_one_decay_is_gated_retention(qkv, gates):
    alpha, _ = gates
    key_only = alpha[:, None].expand(T, K), torch.ones(T, V, dtype=torch.float64)
    value_only = torch.ones(T, K, dtype=torch.float64), alpha[:, None].expand(T, V)
    expected = gated_retention.parallel(*qkv, alpha)
    for decays in (key_only, value_only):
        same(decaying_fast_weights.recurrence(*qkv, *decays)[0], expected)


# Mamba


def mamba_inputs() -> tuple[Tensor, ...]:
    delta = 2 * torch.sigmoid(wave(81, T, 2))
    return wave(84, T, 3), wave(83, T, 3), wave(80, T, 2), delta, wave(82, 2, 3), wave(85, 2)


def test_signed_mamba_as_released():
    same(mamba.recurrence(*mamba_inputs())[0], released("mamba signed"), 1e-11)


def test_mamba_range_of_the_transition():
    delta, A_log = torch.logspace(-6, 3, 50, dtype=torch.float64), wave(82, 50, 3)
    signed = mamba.transition(delta, A_log, signed=True)
    assert -1 <= signed.min() < -0.9
    assert 0.99 < signed.max() <= 1
    same((signed + 1) / 2, mamba.transition(delta, A_log, signed=False))
    apart(mamba.recurrence(*mamba_inputs())[0], mamba.recurrence(*mamba_inputs(), signed=False)[0])


# S4


def test_s4_kernel_as_released_and_convolution_mode():
    C = torch.complex(wave(49, 4), wave(50, 4))
    dA, dB = s4.discretise(s4.lin(8), torch.ones(4, dtype=torch.complex128), 0.05)
    K = s4.kernel(dA, dB, C, 5)
    same(K, released("s4d kernel"), 1e-11)
    u = wave(150, 5)
    same(s4.recurrence(u, dA, dB, C, 0.4)[0], s4.convolution(u, K, 0.4))


def test_s4_starts():
    same(s4.legs(8).imag, -released("legs imaginary").flip(0), 1e-10)
    same(s4.legs(8).real, torch.full((4,), -0.5, dtype=torch.float64), 1e-12)
    # S4D-Inv follows the largest frequency of LegS; S4D-Lin is the Fourier series'.
    top = [float(start(64).imag.max()) for start in (s4.inv, s4.legs)]
    assert top[0] == pytest.approx(top[1], rel=0.02)
    same(s4.lin(8).imag, torch.tensor([0, math.pi, 2 * math.pi, 3 * math.pi], dtype=torch.float64))


def test_s4_diagonal_is_the_dense_map_in_its_eigenbasis():
    A, B = s4.hippo_legs(6)
    P = torch.sqrt(torch.arange(6, dtype=torch.float64) + 0.5)
    normal, C, u = A + torch.outer(P, P), wave(151, 6), wave(152, 20)
    values, vectors = torch.linalg.eig(normal)
    half = values.imag > 0
    B_, C_ = torch.linalg.inv(vectors) @ B.to(values.dtype), C.to(values.dtype) @ vectors
    dA, dB = s4.discretise(values[half], B_[half], 0.1, bilinear=True)
    same(s4.recurrence(u, dA, dB, C_[half], 0)[0], s4.dense_recurrence(u, normal, B, C, 0.1), 1e-10)


def test_s4_zero_order_hold_is_exact_for_constant_input():
    """x(t) = (exp(A t) - 1) / A B u for a constant u."""
    A, B = s4.lin(8), torch.ones(4, dtype=torch.complex128)
    dA, dB = s4.discretise(A, B, 0.05)
    _, x = s4.recurrence(torch.ones(20, dtype=torch.float64), dA, dB, B, 0)
    same(torch.view_as_real(x), torch.view_as_real((torch.exp(A) - 1) / A * B))


# RWKV


def test_rwkv4_as_released_and_by_definition():
    k, v, w, u = 2 * wave(23, T, K), wave(24, T, K), wave(25, K).exp(), wave(26, K)
    o, _ = rwkv4.recurrence(k, v, w, u)
    same(o, released("rwkv4"), 1e-7)
    same(o, rwkv4.by_definition(k, v, w, u))
    shifted, _ = rwkv4.recurrence(k + 900, v, w, u)
    same(shifted, o, 1e-11)


def test_rwkv7_as_released(qkv):
    q, k, v = qkv
    w = torch.exp(-torch.sigmoid(wave(36, T, K)))
    a, kappa = torch.sigmoid(wave(37, T, K)), torch.nn.functional.normalize(wave(38, T, K), dim=-1)
    same(rwkv7.recurrence(q, w, k, v, kappa, a)[0], released("rwkv7"), 1e-11)


def test_rwkv7_limits(qkv):
    q, k, v = qkv
    one = torch.ones(T, K, dtype=torch.float64)
    kappa, key = rwkv7.keys(k, one[0], one[0], 0.5 * one)
    same(kappa.norm(dim=-1), one[:, 0])
    same(key, 0.5 * k)
    # No decay, a = beta, key = beta kappa: DeltaNet.
    o, _ = rwkv7.recurrence(q, one, 0.5 * kappa, v, kappa, 0.5 * one)
    same(o, delta_scan.recurrence(q, kappa, v, 0.5 * one[:, 0])[0])
    assert rwkv7.decay(torch.tensor([-50.0, 50.0], dtype=torch.float64)).tolist() == pytest.approx(
        [
            1,
            0.5452,
        ],
        abs=1e-4,
    )
    same(rwkv7.bonus(q, k, v, one[0]), (q * k).sum(1, keepdim=True) * v)


# HGRN, LRU, RG-LRU


def test_hgrn_as_released():
    c, forget, bound = wave(27, T, K), wave(28, T, K), 0.5 * torch.sigmoid(wave(29, K))
    same(hgrn.recurrence(c, forget, bound)[0], released("hgrn"), 1e-11)


def test_hgrn_complex_is_real_at_angle_zero_and_turns_otherwise():
    c, forget, bound = wave(27, T, K), wave(28, T, K), 0.5 * torch.sigmoid(wave(29, K))
    real, _ = hgrn.recurrence(c, forget, bound)
    z = torch.complex(c, torch.zeros_like(c))
    same(hgrn.recurrence(z, forget, bound, torch.zeros_like(bound))[0].real, real)
    # In the frame that turns with theta it is the real recurrence.
    theta = hgrn.first_angles(K)
    turned, _ = hgrn.recurrence(z, forget, bound, theta)
    turn = torch.polar(torch.ones(T, K, dtype=torch.float64), torch.arange(T)[:, None] * theta)
    parts = (hgrn.recurrence(x, forget, bound)[0] for x in ((z / turn).real, (z / turn).imag))
    same(torch.view_as_real(turned), torch.view_as_real(torch.complex(*parts) * turn))


def test_hgrn_lower_bounds():
    bounds = hgrn.lower_bounds(wave(160, 4, K))
    same(bounds[0], torch.zeros_like(bounds[0]))
    assert (bounds.diff(dim=0) > 0).all()
    assert (bounds < 1).all()


def test_lru_is_a_convolution():
    N, M = 3, 2
    nu, theta = wave(170, N), wave(171, N)
    B, C = (
        torch.complex(wave(s, *shape), wave(s + 1, *shape))
        for s, shape in ((172, (N, M)), (174, (M, N)))
    )
    D, u, gamma = wave(176, M), wave(177, T, M), lru.first_gamma(nu)
    o, _ = lru.recurrence(u, nu, theta, gamma, B, C, D)
    eigen = lru.eigenvalues(nu, theta)
    same(gamma.square() + eigen.abs().square(), torch.ones(N, dtype=torch.float64))
    for t in range(T):
        y = D * u[t]
        for j in range(t + 1):
            y = y + (C @ torch.diag(eigen ** (t - j) * gamma) @ B @ u[j].to(B.dtype)).real
        same(o[t], y)


def test_rg_lru_as_released():
    x = wave(35, T, 4)
    gates = (rg_lru.block_diagonal(x, wave(s, 2, 2, 2), wave(s + 2, 2, 2)) for s in (32, 31))
    starts = torch.tensor([True, False, False, True, False])
    o, _ = rg_lru.recurrence(x, *gates, wave(30, 4), starts)
    same(o, released("rglru"), 1e-11)


def test_rg_lru_parameter_has_the_sign_of_minus_lambda():
    x, zero = torch.ones(2, 1, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    parameter = torch.tensor([0.3], dtype=torch.float64)
    o, _ = rg_lru.recurrence(x, zero, zero, parameter)
    a = torch.sigmoid(-parameter) ** (8 * 0.5)
    first = torch.sqrt(1 - a**2) * 0.5
    same(o, torch.stack([first, a * first + first]))


# GateLoop, Hyena


def test_gate_loop_two_ways_and_real(qkv, gates):
    a = gate_loop.transition(wave(180, T, K), 3 * wave(181, T, K))
    same(gate_loop.recurrence(*qkv, a)[0], gate_loop.parallel(*qkv, a))
    alpha, _ = gates
    real = torch.complex(alpha, torch.zeros_like(alpha))[:, None].expand(T, K)
    same(gate_loop.recurrence(*qkv, real)[0], gated_retention.recurrence(*qkv, alpha)[0])


def test_gate_loop_released_cell_is_hgrn_without_bound():
    x, i, o = (wave(s, T, K) for s in (182, 183, 184))
    y, _ = gate_loop.released(x, i, o)
    h, _ = hgrn.recurrence(torch.tanh(x), -i, torch.zeros(K, dtype=torch.float64))
    same(y, torch.sigmoid(o) * torch.tanh(h))


def test_hyena_as_released():
    q, k, v, h = (wave(51 + i, T, K) for i in range(4))
    same(hyena.hyena(q, k, v, h, wave(55, K)), released("hyena"), 1e-11)


def test_multi_head_hyena():
    q, k, v, h = wave(51, T, K), wave(52, T, K), wave(53, T, V), wave(190, T)
    age = (torch.arange(T)[:, None] - torch.arange(T)).clamp_min(0)
    same(hyena.multi_head(q, k, v, h), torch.tril(h[age] * (q @ k.T)) @ v)
    # Heads of one channel: Hyena. A geometric filter: retention.
    one = hyena.multi_head(q[:, :1], k[:, :1], v[:, :1], h, 0.2)
    same(one, hyena.hyena(q[:, :1], k[:, :1], v[:, :1], h[:, None], 0.2))
    decay = torch.exp(-0.3 * torch.arange(T, dtype=torch.float64))
    same(hyena.multi_head(q, k, v, decay), lightning.recurrence(q, k, v, 0.3)[0])


# ReBased, DiJiang


def test_rebased_as_released_and_recurrent(qkv):
    o, _ = rebased.recurrence(*qkv)
    same(o, released("rebased default"), 1e-11)
    same(o, rebased.parallel(*qkv))


def test_rebased_transform_and_features():
    x = wave(200, T, 4)
    y = rebased.transform(x, wave(201, 4), wave(202, 4))
    z = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    same(y, z * wave(201, 4) + wave(202, 4))
    same(rebased.features(y) @ rebased.features(x).T, (y @ x.T).square() / 4)
    apart(y.square() @ x.square().T / 4, (y @ x.T).square() / 4)


def test_dijiang_as_released():
    q, k, v = wave(57, 2, T, 4)[1], wave(58, 2, T, 4)[1], wave(59, 2, T, V)[1]
    t, decay = wave(56, 4), dijiang.released_decay(2)[1]
    phi_q, phi_k = (dijiang.released_features(x, t) for x in (q, k))
    same(dijiang.released_recurrence(phi_q, phi_k, v, decay)[0], released("dijiang"), 1e-11)


def test_dijiang_as_printed():
    x, t, weight = wave(57, T, 4), wave(56, 4), torch.sigmoid(wave(203, 4))
    C = dijiang.dct(4)
    same(C @ C.T, torch.eye(4, dtype=torch.float64))
    phi = dijiang.features(x, t, weight)
    same(phi[2], weight * torch.exp(torch.diag(t) @ C @ x[2]))
    o, _ = dijiang.recurrence(phi, phi, wave(59, T, V))
    scores = torch.tril(phi @ phi.T)
    same(o, scores @ wave(59, T, V) / scores.sum(1, keepdim=True))


# Gated retention, DeltaNet and its kin


def test_gated_retention(qkv):
    gamma = gated_retention.gate(wave(210, T))
    same(gamma**16, torch.sigmoid(wave(210, T)))
    o, _ = gated_retention.recurrence(*qkv, gamma)
    same(o, gated_retention.parallel(*qkv, gamma))


def test_block_householder():
    q, k, v, beta = (
        wave(220, T, 6),
        wave(221, T, 6),
        wave(222, T, V),
        torch.sigmoid(wave(223, T, 2)),
    )
    o, S = block_householder.recurrence(q, k, v, beta)
    apart_, states = zip(
        *(
            delta_scan.recurrence(q[:, 3 * g : 3 * g + 3], k[:, 3 * g : 3 * g + 3], v, beta[:, g])
            for g in range(2)
        ),
        strict=True,
    )
    same(o, sum(apart_))
    same(S, torch.cat(states, 1))
    one_block, _ = block_householder.recurrence(q, k, v, beta[:, :1])
    same(one_block, delta_scan.recurrence(q, k, v, beta[:, 0])[0])
    apart(one_block, o)


@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_delta_net_by_scan(length):
    q, k, v = wave(230, length, K), wave(231, length, K), wave(232, length, V)
    beta, start = 2 * torch.sigmoid(wave(233, length)), wave(234, V, K)
    o, S = delta_scan.recurrence(q, k, v, beta, start)
    o2, S2 = delta_scan.scan(q, k, v, beta, start)
    same(o, o2)
    same(S, S2)


def test_multi_head_delta_variants():
    n = 3
    q, k, v = wave(240, T, n, K), wave(241, T, n, K), wave(242, T, n, V)
    eta = torch.sigmoid(wave(243, T, n))
    one = slice(None), slice(0, 1)

    def slot(i: int, q: Tensor, k: Tensor, v: Tensor, eta: Tensor) -> Tensor:
        at = (x[:, min(i, x.shape[1] - 1)] for x in (q, k, v, eta))
        return delta_scan.recurrence(*at)[0]

    variants = {
        "multi-head": (q, k, v, eta),
        "multi-KV": (q[one], k, v, eta),
        "multi-value": (q[one], k[one], v, eta[one]),
        "multi-key": (q[one], k, v[one], eta),
        "multi-query": (q, k[one], v[one], eta[one]),
    }
    for name, inputs in variants.items():
        y, W = multi_head_delta.recurrence(*inputs)
        assert len(W) == (1 if name == "multi-query" else n)
        same(y, torch.stack([slot(i, *inputs) for i in range(n)], 1))

    # Summed, two of them are one DeltaNet: the blog's read-out does not tell them apart.
    y, _ = multi_head_delta.recurrence(*variants["multi-value"])
    same(y.sum(1), delta_scan.recurrence(q[:, 0], k[:, 0], v.sum(1), eta[:, 0])[0])
    y, _ = multi_head_delta.recurrence(*variants["multi-query"])
    same(y.sum(1), delta_scan.recurrence(q.sum(1), k[:, 0], v[:, 0], eta[:, 0])[0])


def test_delta_product_is_delta_net_on_the_expanded_sequence():
    n = 3
    q, k, v = wave(240, T, K), wave(241, T, n, K), wave(242, T, n, V)
    eta = torch.sigmoid(wave(243, T, n))
    y, _ = multi_head_delta.delta_product(q, k, v, eta)
    expanded = q.repeat_interleave(n, 0), k.flatten(0, 1), v.flatten(0, 1), eta.flatten()
    same(y, delta_scan.recurrence(*expanded)[0][n - 1 :: n])
    # Mutually orthogonal keys within a token make it multi-KV, summed; others do not.
    summed, _ = multi_head_delta.recurrence(q[:, None], k, v, eta)
    apart(y, summed.sum(1))
    k = torch.eye(n, K, dtype=torch.float64).expand(T, n, K)
    y, _ = multi_head_delta.delta_product(q, k, v, eta)
    summed, _ = multi_head_delta.recurrence(q[:, None], k, v, eta)
    same(y, summed.sum(1))


# KDA, GDN-2, log-linear attention


def test_kda_and_gdn2_as_released(qkv, gates):
    q, k, v = qkv
    _, beta = gates
    log_a = -torch.sigmoid(wave(39, T, K))
    erase, write = torch.sigmoid(wave(40, T, K)), torch.sigmoid(wave(41, T, V))
    same(kda.recurrence(q, k, v, log_a, beta)[0], released("kda"), 1e-11)
    same(gdn2.recurrence(q, k, v, log_a, erase, write)[0], released("gdn2"), 1e-11)
    equal = beta[:, None].expand(T, K), beta[:, None].expand(T, V)
    same(gdn2.recurrence(q, k, v, log_a, *equal)[0], kda.recurrence(q, k, v, log_a, beta)[0])


def test_kda_gates():
    log_a = kda.bounded_log_decay(wave(42, T, K), 0.3, wave(43, K))
    same(log_a, released("kda gate"), 1e-11)
    far = kda.bounded_log_decay(torch.tensor([-100.0, 100.0], dtype=torch.float64), bound=-3.0)
    same(far, torch.tensor([0.0, -3.0], dtype=torch.float64))
    free = kda.log_decay(torch.tensor([0.0], dtype=torch.float64), A_log=math.log(2))
    same(free, torch.tensor([-2 * math.log(2)], dtype=torch.float64))


def log_linear_inputs() -> tuple[Tensor, ...]:
    n = 13
    decay, scales = -torch.sigmoid(wave(47, n)), torch.sigmoid(wave(48, n, 5))
    return wave(44, n, K), wave(45, n, K), wave(46, n, V), decay, scales


def test_log_linear_as_released_and_by_definition():
    o, _ = log_linear.recurrence(*log_linear_inputs())
    same(o[-4:], released("log linear"), 1e-11)
    same(o, log_linear.by_definition(*log_linear_inputs()))


def test_log_linear_with_equal_scales_is_gated_retention():
    q, k, v, decay, scales = log_linear_inputs()
    o, _ = log_linear.recurrence(q, k, v, decay, torch.ones_like(scales))
    same(o, gated_retention.recurrence(q, k, v, decay.exp())[0])


# All at once


def test_lifted_to_a_batch_of_heads():
    shape = (2, T, 3)
    q, k, v, beta = (
        wave(250, *shape, K),
        wave(251, *shape, K),
        wave(252, *shape, V),
        wave(253, *shape),
    )
    o, S = lifted.each_head(delta_scan.recurrence, q, k, v, beta)
    assert o.shape == (*shape, V)
    same(S[1, 2], delta_scan.recurrence(q[1, :, 2], k[1, :, 2], v[1, :, 2], beta[1, :, 2])[1])
    same(o[1, :, 2], delta_scan.recurrence(q[1, :, 2], k[1, :, 2], v[1, :, 2], beta[1, :, 2])[0])


def test_oracles_are_differentiable():
    """Colleagues take gradients of them, through the inner gradients too."""
    weights, (q, k, v, *rest) = ttt_inputs(None)
    assert torch.autograd.gradcheck(
        lambda q, k, v: ttt.recurrence(ttt.linear, weights, q, k, v, *rest)[0],
        tuple(x.requires_grad_() for x in (q, k, v)),
        fast_mode=True,
    )
    gates = titans_gates(T)
    assert torch.autograd.gradcheck(
        lambda q, k, v: titans.recurrence(titans.linear, {"W": wave(99, V, K)}, q, k, v, *gates, 2)[
            0
        ],
        tuple(x.requires_grad_() for x in (wave(1, T, K), wave(2, T, K), wave(3, T, V))),
        fast_mode=True,
    )
