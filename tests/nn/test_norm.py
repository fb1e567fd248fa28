"""Norms against their equation."""

import pytest
import torch

from deltarule.nn import RMSNorm
from deltarule.nn import norm as norms
from deltarule.nn.norm import GatedRMSNorm, GroupRMSNorm
from promised import promised
from tolerance import assert_close, relative_rms


def rms_norm(x, eps):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)


def test_rms_norm():
    norm, x = RMSNorm(7, eps=1e-3).double(), torch.randn(2, 3, 7, dtype=torch.float64)
    norm.weight.data.copy_(torch.randn(7))
    assert relative_rms(norm(x), norm.weight * rms_norm(x, 1e-3)) <= 1e-12


def test_rms_norm_of_bfloat16_rounds_once():
    x = torch.randn(100, 64)
    y = RMSNorm(64).bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert relative_rms(y, rms_norm(x.bfloat16().double(), 1e-5)) < 2**-8


def test_gated_norm():
    x, gate = torch.randn(2, 3, 2, 7, dtype=torch.float64).unbind()
    for activation, function in (("silu", torch.nn.SiLU()), ("sigmoid", torch.nn.Sigmoid())):
        norm = GatedRMSNorm(7, 1e-5, activation).double()
        assert relative_rms(norm(x, gate), rms_norm(x, 1e-5) * function(gate)) <= 1e-12
        assert relative_rms(norm(x), rms_norm(x, 1e-5)) <= 1e-12


def test_group_norm_has_a_weight_for_each_channel():
    norm, x = GroupRMSNorm(2, 6).double(), torch.randn(4, 6, dtype=torch.float64)
    norm.weight.data.copy_(torch.arange(6))
    expected = torch.cat([rms_norm(part, 1e-5) for part in x.chunk(2, dim=-1)], dim=-1)
    assert relative_rms(norm(x), torch.arange(6) * expected) <= 1e-12


def test_a_norm_less_one_is_the_plain_one_and_loses_nothing_in_16_bits():
    x = torch.randn(3, 64)
    norm, plain = RMSNorm(64, zero_centered=True), RMSNorm(64)
    assert torch.equal(norm(x), plain(x))
    torch.nn.init.normal_(norm.weight, std=1e-3)
    plain.weight.data = 1 + norm.weight.data
    assert torch.equal(norm(x), plain(x))
    norm, half = norm.to(torch.bfloat16), x.to(torch.bfloat16)
    assert norms.scale_of(norm.weight, True).dtype == torch.float32
    # Rounded once: the weights, which 1 + w in 16 bits would lose, still tell.
    wide = RMSNorm(64, zero_centered=True)
    wide.weight.data = norm.weight.data.float()
    assert torch.equal(norm(half), wide(half.float()).to(torch.bfloat16))


@pytest.fixture
def kernels(monkeypatch):
    """Kernels under Triton's interpreter."""
    promised("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    monkeypatch.setattr(norms, "why_no_gated_norm", lambda *_: None)


def normed_product():
    """A norm, x, a gate and a projection, all with gradients."""
    norm, module = GatedRMSNorm(6), torch.nn.Linear(12, 10, bias=False)
    norm.weight.data.copy_(torch.randn(6))
    x, gate = torch.randn(2, 2, 9, 2, 6).unbind()
    return norm, x.requires_grad_(), gate.requires_grad_(), module


# Bytes from which the norm is computed again.
@pytest.mark.parametrize("least", [0, 2**25])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.usefixtures("kernels")
def test_a_norm_and_the_product_after_it_are_one_node(least, gated, monkeypatch):
    monkeypatch.setattr(norms, "LEAST", least)
    norm, x, gate, module = normed_product()
    gate = gate if gated else None
    y = norms.gated_norm_product(norm, x, gate, module)
    assert "NormedProduct" in type(y.grad_fn).__name__
    leaves = [x, norm.weight, module.weight, *([gate] if gated else [])]
    wide = [given.detach().double().requires_grad_() for given in leaves]
    n = rms_norm(wide[0], 1e-5) * wide[1]
    n = n * torch.nn.functional.silu(wide[3]) if gated else n
    expected = n.flatten(-2) @ wide[2].mT
    assert_close(y, expected, dtype=torch.float32)
    d_y = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, d_y)
    exact = torch.autograd.grad(expected, wide, d_y.double())
    for a, b in zip(found, exact, strict=True):
        assert_close(a, b, dtype=torch.float32, gradient=True)


@pytest.mark.usefixtures("kernels")
def test_the_gradient_by_a_gate_is_written_to_its_slot():
    norm, x, gate, module = normed_product()
    slots = []

    def slot(like):
        slots.append(torch.full((2, 9, 20), torch.nan)[..., 8:])
        assert like.shape == slots[-1].shape
        return slots[-1]

    d_y = torch.randn(2, 9, 10)
    given = [x, gate, norm.weight, module.weight]
    run = norms.gated_norm_product
    plain = torch.autograd.grad(run(norm, x, gate, module), given, d_y)
    found = torch.autograd.grad(run(norm, x, gate, module, slot), given, d_y)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert found[1].data_ptr() == slots[0].data_ptr()


@pytest.mark.usefixtures("kernels")
def test_modules_that_are_more_are_called():
    norm, x, gate, module = normed_product()
    handle = norm.register_forward_hook(lambda *_: None)
    assert norms.gated_norm_product(norm, x, gate, module) is None
    handle.remove()
    module.register_forward_pre_hook(lambda *_: None)
    assert norms.gated_norm_product(norm, x, gate, module) is None
    assert norms.gated_norm_product(norm, x, gate, torch.nn.Linear(12, 10)) is None
    assert norms.gated_norm_product(RMSNorm(6), x, gate, torch.nn.Linear(12, 10, False)) is None
    # A norm of all heads together.
    assert (
        norms.gated_norm_product(GatedRMSNorm(12), x, gate, torch.nn.Linear(12, 10, False)) is None
    )
