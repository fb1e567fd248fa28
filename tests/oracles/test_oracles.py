"""Each oracle against the numbers of its authors' programs; beside them the library's own tests."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, normalize

from oracles import (
    comba,
    delta_scan,
    gdn2,
    hgrn,
    hyena,
    kda,
    lightning,
    mamba,
    mesa,
    mlstm,
    rebased,
    rg_lru,
    rwkv4,
    rwkv7,
    s4,
    slstm,
    titans,
    ttt,
)


def wave(seed, *shape):
    """Numbers in [-1, 1] without a visible pattern, the same on every machine, float64."""
    n = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    return torch.sin(1.37 * (n + 11 * seed) ** 1.5).reshape(shape)


T, K, V = 5, 3, 2
DOUBLE = torch.float64
Q, KEY, VALUE = QKV = wave(1, T, K), wave(2, T, K), wave(3, T, V)
ALPHA, BETA = torch.sigmoid(wave(4, T)), torch.sigmoid(wave(5, T))
RIDGE = 0.5 + torch.sigmoid(wave(22, K))
MLSTM = wave(1, T, K), wave(2, T, K), wave(8, T, K), 2 * wave(6, T), 3 * wave(7, T)
CAPPED = Q, KEY, VALUE, mlstm.soft_cap(9 * MLSTM[3], 15), mlstm.soft_cap(9 * MLSTM[4], 15)
CELLS = wave(9, T, 4, 2, 2).unbind(1)
R = {name: wave(10, 2, 4, 2, 2)[:, i] for i, name in enumerate("ifzo")}
MAMBA = (
    wave(84, T, 3), wave(83, T, 3), wave(80, T, 2), 2 * torch.sigmoid(wave(81, T, 2)),
    wave(82, 2, 3), wave(85, 2),
)  # fmt: skip
RWKV4 = 2 * wave(23, T, K), wave(24, T, K), wave(25, K).exp(), wave(26, K)
HGRN = wave(27, T, K), wave(28, T, K), 0.5 * torch.sigmoid(wave(29, K))
HYENA = tuple(wave(51 + i, T, K) for i in range(4))
LOG_A = -torch.sigmoid(wave(39, T, K))


def titans_in_pytorch():
    """The memory of titans-pytorch: an MLP with a residual and a norm."""
    D, n = 3, 6
    x = wave(60, n, D)

    def parameter(index, *shape):
        return 0.6 * wave(64 + index, *shape)

    # Order: the memory's weights, q, k, v, then weight and bias of step, momentum, decay.
    weights = {
        "gamma": parameter(0, D), "W1": parameter(1, D, 2 * D), "W2": parameter(2, 2 * D, D)
    }  # fmt: skip
    q, k, v = (x @ parameter(3 + i, D, D).T for i in range(3))
    theta, eta, alpha = (
        torch.sigmoid(x @ parameter(6 + 2 * i, D) + parameter(7 + 2 * i, 1)) for i in range(3)
    )

    def memory(w, x):
        y = gelu(x @ w["W1"]) @ w["W2"]
        return x + layer_norm(y, y.shape) * (w["gamma"] + 1)

    return titans.recurrence(memory, weights, q, k, v, theta / D, eta, alpha, mini_batch=2)[0]


def ttt_outputs(network, width):
    D, n, b = 4, 6, 3
    weights = {"W1": 0.4 * wave(18, D, width or D), "b1": 0.1 * wave(19, width or D)}
    if width:
        weights |= {"W2": 0.4 * wave(20, width, D), "b2": 0.1 * wave(21, D)}
    scale = ttt.default_scale(b) + 0.1 * wave(15, b)
    norm = 1 + 0.3 * wave(16, D), 0.2 * wave(17, D)
    tokens = (wave(seed, n, D) for seed in (11, 12, 13))
    step = torch.sigmoid(wave(14, n))
    return ttt.recurrence(network, weights, *tokens, step, scale, *norm)[0]


def s4_kernel():
    """What a single 1 leaves in the outputs."""
    C = torch.complex(wave(49, 4), wave(50, 4))
    dA, dB = s4.discretise(s4.lin(8), torch.ones(4, dtype=torch.complex128), 0.05)
    return s4.recurrence(torch.eye(T, dtype=DOUBLE)[0], dA, dB, C, 0.0)[0]


def rg_lru_outputs():
    x = wave(35, T, 4)
    gates = (rg_lru.block_diagonal(x, wave(s, 2, 2, 2), wave(s + 2, 2, 2)) for s in (32, 31))
    starts = torch.tensor([True, False, False, True, False])
    return rg_lru.recurrence(x, *gates, wave(30, 4), starts)[0]


def rwkv7_outputs():
    w, a = torch.exp(-torch.sigmoid(wave(36, T, K))), torch.sigmoid(wave(37, T, K))
    kappa = normalize(wave(38, T, K), dim=-1)
    return rwkv7.recurrence(Q, w, KEY, VALUE, kappa, a)[0]


def gdn2_outputs():
    erase, write = torch.sigmoid(wave(40, T, K)), torch.sigmoid(wave(41, T, V))
    return gdn2.recurrence(*QKV, LOG_A, erase, write)[0]


RELEASED = {
    "comba": lambda: comba.recurrence(*QKV, ALPHA, BETA, 0.7 * BETA)[0],
    "comba state": lambda: comba.recurrence(*QKV, ALPHA, BETA, 0.7 * BETA)[1],
    "mlstm step": lambda: mlstm.recurrence(*MLSTM, eps=1e-6)[0],
    "mlstm 7b": lambda: mlstm.recurrence(*CAPPED, eps=1e-6)[0],
    "slstm": lambda: slstm.recurrence(*CELLS, R)[0].flatten(1),
    "slopes": lambda: lightning.released_slopes(6, 3, 8),
    "titans": titans_in_pytorch,
    "ttt linear": lambda: ttt_outputs(ttt.linear, None),
    "ttt mlp": lambda: ttt_outputs(ttt.mlp, 16),
    "mesa": lambda: mesa.recurrence(Q, KEY, wave(8, T, K), ALPHA, BETA, RIDGE)[0],
    "mamba signed": lambda: mamba.recurrence(*MAMBA)[0],
    "s4d kernel": s4_kernel,
    "legs imaginary": lambda: -s4.legs(8).imag.flip(0),
    "rwkv4": lambda: rwkv4.recurrence(*RWKV4)[0],
    "rwkv7": rwkv7_outputs,
    "hgrn": lambda: hgrn.recurrence(*HGRN)[0],
    "rglru": rg_lru_outputs,
    "hyena": lambda: hyena.hyena(*HYENA, wave(55, K)),
    "rebased default": lambda: rebased.recurrence(*QKV)[0],
    "kda": lambda: kda.recurrence(*QKV, LOG_A, BETA)[0],
    "kda gate": lambda: kda.bounded_log_decay(wave(42, T, K), 0.3, wave(43, K)),
    "gdn2": gdn2_outputs,
}
# What the programs gave; the file names them and their commits.
NUMBERS = json.loads(Path(__file__).with_name("released.json").read_text())["numbers"]
# The release of TTT rounds the derivative of its GELU to eight digits.
DIGITS = {"ttt mlp": 1e-9, "rwkv4": 1e-7, "legs imaginary": 1e-10}


@pytest.mark.parametrize("name", RELEASED)
def test_as_released(name):
    expected = torch.tensor(NUMBERS[name], dtype=DOUBLE)
    torch.testing.assert_close(RELEASED[name](), expected, rtol=0, atol=DIGITS.get(name, 1e-11))


def test_forms_that_the_pages_point_to():
    """DeltaNet without a loop, and the Mesa layer by the inverse that is carried."""
    loop = kda.recurrence(Q, KEY, VALUE, 0 * KEY, BETA)
    for y, expected in zip(delta_scan.scan(Q, KEY, VALUE, BETA), loop, strict=True):
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    o, _ = mesa.sherman_morrison(Q, KEY, VALUE, BETA, RIDGE)
    expected, _ = mesa.recurrence(Q, KEY, VALUE, torch.ones(T, dtype=DOUBLE), BETA, RIDGE)
    torch.testing.assert_close(o, expected, rtol=0, atol=1e-12)
