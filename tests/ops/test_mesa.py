"""`mesa`: recursive least squares, its chunks, its conjugate gradients and their gradients."""

import pytest
import torch
import torch.nn.functional as F

from deltarule import mesa
from deltarule.ops import mini_batches
from deltarule.ops.mesa.api import IMPLEMENTATIONS, MORE_ITERATIONS
from nodes import kept
from ops.contract import DOUBLE, HV, OPERATORS, H, K, draw, least_squares
from oracles import mesa as oracle
from tolerance import assert_close, relative_rms

LENGTHS = (3, 0, 70, 1, 0, 1)
every_impl = pytest.mark.parametrize("impl", [x for x in IMPLEMENTATIONS if x != "triton"])


MESA = OPERATORS["mesa"]


def assert_same(found, expected):
    for y, wanted in zip(found, expected, strict=True):
        assert_close(y, wanted)


@every_impl
@pytest.mark.parametrize("iterations", [None, 3 * K])
@pytest.mark.parametrize("begun", [False, True])
def test_equals_the_papers_recurrence(impl, iterations, begun):
    """From a state, with decays and another scale, and from nothing without."""
    x, scale = MESA.draw(tokens=70 if begun else 30), 0.4 if begun else 1.0
    if not begun:
        x |= {"covariance": 0 * x["covariance"], "values": 0 * x["values"], "log_decay": None}
    found, *state = MESA.run(**x, impl=impl, iterations=iterations, scale=scale)
    for row, head in [(0, 0), (0, 1), (1, 3)]:
        q, k = (x[name][row, :, head * H // HV] for name in "qk")
        v, beta = x["v"][row, :, head], x["beta"][row, :, head]
        gamma = x["log_decay"][row, :, head].exp() if begun else torch.ones_like(beta)
        before = x["covariance"][row, head], x["values"][row, head]
        o, after = oracle.recurrence(q, k, v, gamma, beta, x["regularizer"][head], before)
        assert_close(found[row, :, head], scale * o)
        assert_same([y[row, head] for y in state], after)


def preferring(tokens, size, spread, dtype=torch.float32, device="cpu"):
    """Of so many directions the last is used 10^-spread times as much as the first, for good."""
    turned, _ = torch.linalg.qr(draw(size, size))
    k = F.normalize(draw(tokens, size) * torch.logspace(0, -spread, size) @ turned, dim=-1)
    x = {"q": F.normalize(draw(tokens, size), dim=-1), "k": k, "v": draw(tokens, 8)}
    x = {name: y[None, :, None] for name, y in x.items()}
    x |= {"beta": torch.rand(1, tokens, 1), "regularizer": torch.full((1, size), 0.25)}
    return {name: y.to(dtype).to(device) for name, y in x.items()}


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize(("dtype", "bar"), [(DOUBLE, 1e-12), (torch.float32, 5e-6)])
def test_converges_where_keys_prefer_some_directions(impl, dtype, bar):
    x = preferring(256, 128, 2, dtype)
    found = mesa(**x, scale=1.0, impl=impl).o
    q, k, v, beta = (x[name][0, :, 0].double() for name in ("q", "k", "v", "beta"))
    ridge = x["regularizer"][0].double()
    expected, _ = oracle.recurrence(q, k, v, torch.ones_like(beta), beta, ridge)
    assert relative_rms(found[0, :, 0], expected) <= bar


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("tokens", "size"), [(4096, 16), (4096, 32), (2048, 64)])
def test_what_is_chosen_has_converged_after_many_tokens(tokens, size, device):
    """Three times what an exact solution in float32 is off; 30 or K steps are 2 to 4 % off here."""
    x = preferring(tokens, size, 2.5, device=device)
    wide = {name: y.double().cpu() for name, y in x.items()}
    expected = mesa(**wide, iterations=None).o
    exact = relative_rms(mesa(**x, iterations=None).o.cpu(), expected)
    assert relative_rms(mesa(**x).o.cpu(), expected) <= 3 * exact
    steps = mesa(**x, iterations=size + MORE_ITERATIONS).o
    assert relative_rms(steps.cpu(), expected) <= 3 * exact
    assert relative_rms(mesa(**x, iterations=size).o.cpu(), expected) > 10 * exact


def kept_sizes(x, iterations):
    leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
    with kept() as tensors:
        MESA.run(**leaves, impl="torch", iterations=iterations)
    return [y.shape for y in tensors]


def test_keeps_nothing_of_the_iterations_and_no_matrix_for_a_token():
    x = least_squares(32).draw(1, 256)
    few, many = kept_sizes(x, 5), kept_sizes(x, 50)
    assert few == many
    a_matrix_each = 256 * HV * 32 * 32
    assert max(size.numel() for size in many) < a_matrix_each / 8
    assert max(size.numel() for size in kept_sizes(x, None)) < a_matrix_each / 8


def test_packed_lengths_that_cannot_be_read(monkeypatch):
    x = MESA.draw(lengths=LENGTHS)
    monkeypatch.setattr(mini_batches, "readable", lambda _: False)
    assert_same(MESA.run(**x), MESA.run(**x, impl="reference"))


def test_a_constant_decay_and_none():
    x = MESA.draw(tokens=9)
    rate = -torch.rand(HV, dtype=DOUBLE)
    spread = rate.expand(2, 9, HV)
    for given, same in ((rate, spread), (None, 0 * spread)):
        assert_same(*(MESA.run(**x | {"log_decay": y}) for y in (given, same)))
