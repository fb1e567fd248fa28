"""Norms against their equation."""

import torch

from deltarule.nn import RMSNorm
from deltarule.nn import norm as norms
from deltarule.nn.norm import GatedRMSNorm, GroupRMSNorm
from tolerance import relative_rms


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
