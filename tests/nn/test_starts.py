"""Where layers start: their widths, their gates as the papers draw them, and longer horizons."""

import math

import pytest
import torch
import torch.nn.functional as F

from deltarule import nn
from deltarule.nn import (
    MIXERS,
    RWKV6,
    RWKV7,
    S4D,
    SLSTM,
    GatedDeltaNet,
    Hyena,
    Mesa,
    MultiHeadHyena,
    s4d,
)
from deltarule.nn.gates import starting_horizons
from nn.layers import HIDDEN, LINEAR
from oracles import hgrn, lru, s4
from tolerance import relative_rms

SPREAD = [name for name, mixer in MIXERS.items() if mixer.takes("longest_horizon")]
UNGATED = (
    *("linear_attention", "gated_rfa", "hgrn2", "deltanet", "delta_product", "block_deltanet"),
    "gsa",
)
NO_CONVOLUTION = (
    *("linear_attention", "gated_rfa", "retnet", "gated_retnet", "lightning", "gla", "gate_loop"),
    *("hgrn2", "mlstm", "xlstm_7b", "rwkv6", "rwkv7", "abc", "gsa"),
)
WIDTHS = {
    **dict.fromkeys(("retnet", "gated_retnet"), (32, 64)),
    **dict.fromkeys(("gla", "xlstm_7b", "abc"), (16, 32)),
    **dict.fromkeys(("gated_deltanet", "gated_delta_product", "comba", "comba_released"), (24, 48)),
    "mamba2": (128, 64),
}


@pytest.mark.parametrize("name", ["gated_deltanet", "kda", "mamba2", "gated_delta_product"])
def test_gates_start_where_the_papers_draw_them(name):
    layer = MIXERS[name](HIDDEN, num_heads=2, num_v_heads=1000, head_k_dim=2, head_v_dim=2)
    dt = F.softplus(layer.dt_bias.double())
    assert 0.999e-3 < dt.min() < 1.3e-3
    assert 0.08 < dt.max() < 0.1001
    assert 0.4 < (dt < 1e-2).double().mean() < 0.6
    rate = layer.A_log.double().exp()
    smallest = 1 if name in ("kda", "mamba2") else 0
    assert smallest <= rate.min() + 1e-5 < smallest + 0.2
    assert 15.8 < rate.max() <= 16 + 1e-5
    assert not layer.A_log.isinf().any()


@pytest.mark.parametrize("name", [*LINEAR, "abc", "gsa"])
def test_default_widths(name):
    layer = MIXERS[name](64, num_heads=2)
    assert (layer.head_k_dim, layer.head_v_dim) == WIDTHS.get(name, (32, 32))
    assert layer.num_slots == (2 if layer.rule.page == "multi_head" else layer.head_k_dim)
    assert layer.conv_size == (0 if name in NO_CONVOLUTION else 4)
    assert (layer.g_proj is None) == (name in UNGATED or name.startswith("multi_"))


@pytest.mark.parametrize("name", ["gated_deltanet", "gated_delta_product"])
def test_only_the_keys_have_to_divide_into_heads(name):
    with torch.device("meta"):
        layer = MIXERS[name](1024, num_heads=6)
    assert (layer.head_k_dim, layer.head_v_dim) == (128, 256)


@pytest.mark.parametrize("name", SPREAD)
def test_the_last_head_starts_with_the_longest(name):
    sizes = {"hidden_size": 64, "num_heads": 4, "num_v_heads": 4}
    layer = MIXERS[name](**sizes, longest_horizon=2048.0)
    # 8 * 256^(1/4), ^(2/4), ^(3/4), ^1
    assert starting_horizons(layer) == [pytest.approx([32.0, 128.0, 512.0, 2048.0], abs=0.2)]


def test_a_token_that_asks_for_nothing_is_kept_that_long():
    layer = GatedDeltaNet(32, num_heads=2, longest_horizon=512.0)
    x = torch.zeros(1, 512, 32)
    with torch.no_grad():
        state = layer.init_state(1)
        state["recurrent"].fill_(1)
        kept = layer(x, state)[1]["recurrent"]
    share = kept[0].mean((-1, -2))
    assert share.tolist() == pytest.approx([2.718**-8, 2.718**-1], rel=0.01)


def test_none_is_the_papers_draw():
    torch.manual_seed(3)
    before = GatedDeltaNet(32, num_heads=2).A_log.detach()
    torch.manual_seed(3)
    after = GatedDeltaNet(32, num_heads=2, longest_horizon=None).A_log
    assert torch.equal(before, after)
    assert float(before.exp().min()) > 0
    assert float(before.exp().max()) < 16


def test_starting_values():
    layer = nn.Mamba1(HIDDEN, num_heads=2)
    rate = torch.arange(1.0, 17).expand(2, HIDDEN, 16)
    assert torch.allclose(layer.A_log.exp(), rate, rtol=1e-6)
    dt = F.softplus(layer.dt_bias)
    assert dt.min() > 0.99e-3
    assert dt.max() < 0.101
    s4 = nn.S4(HIDDEN, num_heads=2)
    assert torch.allclose(s4.A_log.exp(), rate, rtol=1e-6)
    assert torch.allclose(s4.B, s4.log_step.exp().unsqueeze(-1).expand(2, HIDDEN, 16))
    assert (nn.LonghornReleased(HIDDEN, num_heads=2).dt_bias == 0).all()
    dfw = nn.DecayingFastWeights(HIDDEN, num_heads=2)
    assert (dfw.a_proj.bias == 4).all()
    assert (dfw.b_proj.bias == 4).all()


def test_hgrn_starts_where_the_paper_does():
    layer = MIXERS["hgrn"](HIDDEN, num_heads=2)
    torch.testing.assert_close(layer.frequency.flatten().double(), hgrn.first_angles(HIDDEN))


def test_rg_lru_starts_with_slow_decays():
    layer = MIXERS["rg_lru"](HIDDEN, num_heads=2)
    decay = torch.exp(-8 * F.softplus(layer.rate.double()))
    assert 0.9 <= decay.min() < decay.max() <= 0.999


def test_lru_starts_where_the_paper_does():
    layer = MIXERS["lru"](HIDDEN, num_heads=1, head_k_dim=4000)
    eigen = lru.eigenvalues(layer.nu.double(), layer.theta.double())
    torch.testing.assert_close(layer.gamma_log.exp().double(), lru.first_gamma(layer.nu.double()))
    # Uniform on the disc: half of them are within a radius of sqrt(1/2).
    assert 0.45 < (eigen.abs() < 0.5**0.5).double().mean() < 0.55
    assert 0.45 < (eigen.imag > 0).double().mean() < 0.55


def test_spectra_are_those_of_the_paper():
    assert relative_rms(s4d.legs(16), s4.legs(32).imag) <= 1e-10
    assert relative_rms(s4d.evenly_spaced(16), s4.lin(32).imag) <= 1e-12
    assert relative_rms(s4d.inverse(16), s4.inv(32).imag.flip(0)) <= 1e-12
    for name, spectrum in s4d.IMAGINARY_PARTS.items():
        layer = S4D(HIDDEN, num_heads=2, spectrum=name)
        assert layer.frequency.shape == (2, HIDDEN, 32)
        torch.testing.assert_close(layer.frequency[1, 5].double(), spectrum(32))
    assert torch.allclose(layer.A_log.exp(), torch.tensor(0.5))


def test_slstm():
    layer = SLSTM(64, num_heads=2)
    assert torch.equal(layer.gate_bias[:, 1], torch.linspace(3, 6, 32).expand(2, 32))
    assert (layer.gate_bias[:, [0, 2, 3]] == 0).all()
    assert (layer.recurrent == 0).all()
    assert layer.recurrent.shape == (2, 4, 32, 32)


def test_hyena():
    layer = Hyena(32, num_heads=1)
    assert layer.filter_size == 2048
    assert layer.taps().shape == (32, 2048)
    # One hundredth is left after 0.3 to 1.5 of the length.
    assert torch.allclose(
        torch.exp(-layer.rate[[0, -1]] * torch.tensor([1.5, 0.3])), torch.tensor(0.01)
    )
    assert (layer.frequency == 14).all()
    assert MultiHeadHyena(32, num_heads=4).taps().shape == (4, 2048)


def test_rwkv6():
    layer = RWKV6(HIDDEN, num_heads=2)
    decay = torch.exp(-torch.exp(layer.decay_bias.flatten()))
    assert decay[0] > 0.997
    assert 0.6 < decay[-1] < 0.7


def test_rwkv7():
    bias = RWKV7(HIDDEN, num_heads=2).decay_bias.flatten()
    decay = torch.exp(-math.exp(-0.5) * torch.sigmoid(bias))
    assert decay[0] > 0.999
    assert 0.85 < decay[-1] < 0.95


def test_mesa_starts_with_a_regularizer_of_one():
    logits = Mesa(HIDDEN, num_heads=2).regularizer_logits
    assert (0.25 + F.softplus(logits) - 1).abs().max() <= 1e-6
