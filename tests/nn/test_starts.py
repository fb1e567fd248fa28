"""Where layers start: their widths, their gates as the papers draw them, and longer horizons."""

import math

import pytest
import torch
import torch.nn.functional as F

from deltarule.nn import MIXERS, S4D, GatedDeltaNet, s4d
from deltarule.nn.gates import starting_horizons
from nn.layers import HIDDEN, LINEAR
from oracles import hgrn, lru, s4
from tolerance import relative_rms

SPREAD = [name for name, mixer in MIXERS.items() if mixer.takes("longest_horizon")]
UNGATED = (
    "linear_attention", "gated_rfa", "hgrn2", "deltanet", "delta_product", "block_deltanet", "gsa",
)  # fmt: skip
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


RATES = torch.arange(1.0, 17).expand(2, HIDDEN, 16)
# By layer: numbers that it starts with, and what they are.
EXACT = {
    "mamba1": lambda l: [(l.A_log.exp(), RATES)],
    "s4": lambda l: [
        (l.A_log.exp(), RATES), (l.B, l.log_step.exp().unsqueeze(-1).expand(2, HIDDEN, 16)),
    ],
    "longhorn_released": lambda l: [(l.dt_bias, 0)],
    "dfw": lambda l: [(l.a_proj.bias, 4), (l.b_proj.bias, 4)],
    "hgrn": lambda l: [(l.frequency.flatten().double(), hgrn.first_angles(HIDDEN))],
    "slstm": lambda l: [
        (l.gate_bias[:, 1], torch.linspace(3, 6, 16).expand(2, 16)),
        (l.gate_bias[:, [0, 2, 3]], 0), (l.recurrent, torch.zeros(2, 4, 16, 16)),
    ],
    "hyena": lambda l: [
        (l.taps(), l.taps().expand(HIDDEN, 2048)), (l.frequency, 14),
        # One hundredth is left after 0.3 to 1.5 of the length.
        (torch.exp(-l.rate[[0, -1]] * torch.tensor([1.5, 0.3])), 0.01),
    ],
    "multi_head_hyena": lambda l: [(l.taps(), l.taps().expand(2, 2048))],
    "mesa": lambda l: [(0.25 + F.softplus(l.regularizer_logits), 1)],
}  # fmt: skip
# By layer: decays from the first channel to the last, or all, and what they lie between.
DECAYS = {
    "rg_lru": lambda l: [(torch.exp(-8 * F.softplus(l.rate.double())), 0.9, 0.999)],
    "rwkv6": lambda l: [
        (torch.exp(-l.decay_bias.flatten()[0].exp()), 0.997, 1),
        (torch.exp(-l.decay_bias.flatten()[-1].exp()), 0.6, 0.7),
    ],
    "rwkv7": lambda l: [
        (torch.exp(-(math.e**-0.5) * l.decay_bias.flatten()[0].sigmoid()), 0.999, 1),
        (torch.exp(-(math.e**-0.5) * l.decay_bias.flatten()[-1].sigmoid()), 0.85, 0.95),
    ],
    "mamba1": lambda l: [(F.softplus(l.dt_bias), 0.99e-3, 0.101)],
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT | DECAYS)
def test_starting_values(name):
    layer = MIXERS[name](HIDDEN, num_heads=2)
    for found, expected in EXACT.get(name, lambda _: [])(layer):
        expected = torch.as_tensor(expected, dtype=found.dtype).expand_as(found)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for found, low, high in DECAYS.get(name, lambda _: [])(layer):
        assert low <= found.min() <= found.max() <= high
        assert found.numel() == 1 or found.min() < found.max()


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
