"""Layers whose state is a vector, against their oracles: HGRN, RG-LRU, LRU, RWKV-4."""

import pytest
import torch
import torch.nn.functional as F

from deltarule.nn import MIXERS
from deltarule.nn.rotation import turned
from nn.layers import HIDDEN, inputs, make
from oracles import hgrn, lru, rg_lru, rwkv4
from tolerance import relative_rms

DOUBLE = torch.float64
T = 12


def drawn(name, **options):
    layer = make(name, DOUBLE, **options)
    return layer, inputs(1, T, DOUBLE)


def unrolled(state, angle):
    """The paper's complex state, from the one that is kept in a turning frame."""
    return torch.complex(*turned(state[0, ..., 0], angle * (T - 1)).chunk(2, dim=-1))


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
def test_hgrn_by_its_oracle(gated):
    layer, x = drawn("hgrn", output_gate=gated)
    bound = torch.rand(2, 4, dtype=DOUBLE)
    layer.lower_bound = lambda shared: bound
    y, state = layer(x)
    c, f = F.silu(layer.v_proj(x[0])).view(T, 2, 2, 4), layer.a_proj(x[0]).view(T, 2, 4)
    rows, kept = [], unrolled(state["recurrent"], layer.frequency)
    for head in range(2):
        given = torch.complex(c[:, head, 0], c[:, head, 1]), f[:, head], bound[head]
        h, last = hgrn.recurrence(*given, layer.frequency[head])
        rows.append(torch.cat([h.real, h.imag], dim=-1))
        assert relative_rms(torch.view_as_real(kept[head]), torch.view_as_real(last)) <= 1e-12
    o = torch.cat(rows, dim=-1)
    o = o / torch.sqrt(o.square().mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight
    expected = layer.o_proj(o * F.silu(layer.g_proj(x[0])) if gated else o)
    assert relative_rms(y[0], expected) <= 1e-12


def test_hgrn_starts_where_the_paper_does():
    layer = MIXERS["hgrn"](HIDDEN, num_heads=2)
    torch.testing.assert_close(layer.frequency.flatten().double(), hgrn.first_angles(HIDDEN))


def test_hgrn_bounds_are_those_of_the_paper():
    layer, shared = MIXERS["hgrn"](HIDDEN, num_heads=2), {}
    layer.find_place(("hgrn", "attention", "hgrn", "hgrn"), 0)
    torch.nn.init.normal_(layer.bound_logits)
    expected = hgrn.lower_bounds(layer.bound_logits.flatten(1))
    layer.lower_bound(shared)
    later = MIXERS["hgrn"](HIDDEN, num_heads=2)
    later.find_place(("hgrn", "attention", "hgrn", "hgrn"), 3)
    torch.testing.assert_close(later.lower_bound(shared).flatten(), expected[2])


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
def test_rg_lru_by_its_oracle(gated):
    layer, x = drawn("rg_lru", output_gate=gated)
    y, state = layer(x)
    u = F.pad(layer.v_proj(x).mT, (3, 0))
    u = F.conv1d(u, layer.v_conv.weight[:, None], groups=len(layer.v_conv.weight)).mT[0]
    a, i = (
        rg_lru.block_diagonal(u, getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_bias"))
        for name in "ai"
    )
    starts = torch.arange(T) == 0
    h, last = rg_lru.recurrence(u, a, i, layer.rate.flatten(), starts)
    gate = F.gelu(layer.g_proj(x[0]), approximate="tanh") if gated else 1
    assert relative_rms(y[0], layer.o_proj(h * gate)) <= 1e-12
    assert relative_rms(state["recurrent"].flatten(), last) <= 1e-12


def test_rg_lru_starts_with_slow_decays():
    layer = MIXERS["rg_lru"](HIDDEN, num_heads=2)
    decay = torch.exp(-8 * F.softplus(layer.rate.double()))
    assert 0.9 <= decay.min() < decay.max() <= 0.999


def test_rg_lru_is_finite_where_its_gates_close():
    layer, x = make("rg_lru"), inputs(1, 6)
    with torch.no_grad():
        layer.a_bias.fill_(-200.0)
    y, _ = layer(x)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
def test_lru_by_its_oracle(gated):
    layer, x = drawn("lru", output_gate=gated)
    y, state = layer(x)
    u, rows = layer.v_proj(x[0]).view(T, 2, 6), []
    kept = unrolled(state["recurrent"], layer.theta.exp())
    for head in range(2):
        B, C = (torch.complex(*p[head].unbind(0)) for p in (layer.B, layer.C))
        rates = layer.nu[head], layer.theta[head], layer.gamma_log[head].exp()
        o, last = lru.recurrence(u[:, head], *rates, B, C, layer.D[head])
        rows.append(F.gelu(o))
        assert relative_rms(torch.view_as_real(kept[head]), torch.view_as_real(last)) <= 1e-12
    gate = torch.sigmoid(layer.g_proj(x[0])) if gated else 1
    assert relative_rms(y[0], layer.o_proj(torch.cat(rows, dim=-1) * gate)) <= 1e-12


def test_lru_starts_where_the_paper_does():
    layer = MIXERS["lru"](HIDDEN, num_heads=1, head_k_dim=4000)
    eigen = lru.eigenvalues(layer.nu.double(), layer.theta.double())
    torch.testing.assert_close(layer.gamma_log.exp().double(), lru.first_gamma(layer.nu.double()))
    # Uniform on the disc: half of them are within a radius of sqrt(1/2).
    assert 0.45 < (eigen.abs() < 0.5**0.5).double().mean() < 0.55
    assert 0.45 < (eigen.imag > 0).double().mean() < 0.55


def shifted(layer, x):
    """What k, v and the receptance of RWKV-4 read of x [T, D]."""
    before = F.pad(x, (0, 0, 1, 0))[:-1]
    return [x + share * (before - x) for share in layer.shift_mix]


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("size", [1, 300])
def test_rwkv4_by_its_oracle(gated, size):
    """Weights up to e^300 neither overflow nor vanish: the maximum that is kept cancels."""
    layer, x = drawn("rwkv4", output_gate=gated)
    layer.k_proj.weight *= size
    y, state = layer(x)
    for_k, for_v, for_g = shifted(layer, x[0])
    k, v = layer.k_proj(for_k), layer.v_proj(for_v)
    o, (a, b, m) = rwkv4.recurrence(k, v, layer.A_log.exp().flatten(), layer.bonus.flatten())
    gate = torch.sigmoid(layer.g_proj(for_g)) if gated else 1
    assert relative_rms(y[0], layer.o_proj(o * gate)) <= 1e-12
    kept = state["recurrent"].view(2, 2, 8)
    for found, expected in ((kept[:, 0], a), (kept[:, 1], b), (state["stabilizer"], m)):
        assert relative_rms(found.flatten(), expected) <= 1e-12


@torch.no_grad()
def test_rwkv4_forgets_nothing_that_is_large_in_float32():
    exact, x = drawn("rwkv4")
    exact.k_proj.weight *= 100
    assert relative_rms(make_like(exact, x), exact(x)[0]) <= 1e-4


def make_like(exact, x):
    layer = make("rwkv4")
    layer.load_state_dict(exact.state_dict())
    return layer(x.float())[0]
