"""The papers' grid: every feature map with every norm, in every layer that has them."""

import itertools

import pytest
import torch

import deltarule
from deltarule.nn import MIXERS
from deltarule.nn.feature_maps import FEATURE_MAPS, NORMS
from nn.layers import HIDDEN, config, inputs, make
from tolerance import relative_rms

DOUBLE = torch.float64
LAYERS = [name for name, layer in MIXERS.items() if getattr(layer, "maps_features", False)]
GRID = [
    words
    for words in itertools.product(LAYERS, FEATURE_MAPS, NORMS)
    if words[0] != "gated_rfa" or FEATURE_MAPS[words[1]].divides
]


def test_layers_of_the_grid():
    assert LAYERS == ["linear_attention", "gated_rfa", "deltanet", "delta_product"]


@pytest.mark.parametrize(("name", "feature_map", "norm"), GRID)
def test_every_combination_steps_packs_and_learns(name, feature_map, norm):
    layer = make(name, DOUBLE, feature_map=feature_map, qk_norm=norm, head_k_dim=4)
    # Small inputs: keys without a norm may be longer than the delta rule can stand.
    x = 0.5 * inputs(1, 12, DOUBLE)
    whole, after = layer(x)
    whole.square().sum().backward()
    for key, parameter in layer.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert (parameter.grad != 0).any(), key
    state, steps = layer.init_state(1), []
    for t in range(12):
        y, state = layer(x[:, t : t + 1], state)
        steps.append(y)
    assert relative_rms(torch.cat(steps, dim=1), whole) <= 1e-12
    assert state.keys() == after.keys()
    packed, _ = layer(x, cu_seqlens=deltarule.pack([5, 7]))
    alone = torch.cat([layer(x[:, :5])[0], layer(x[:, 5:])[0]], dim=1)
    assert relative_rms(packed, alone) <= 1e-12


DIVIDING = [name for name, entry in FEATURE_MAPS.items() if entry.divides]


@pytest.mark.parametrize("feature_map", DIVIDING)
def test_normaliser_runs_with_every_map(feature_map):
    layer = make("linear_attention", feature_map=feature_map, normalizer=True)
    y, state = layer(inputs(2, 9))
    assert y.isfinite().all()
    features = FEATURE_MAPS[feature_map].size(layer.head_k_dim)
    assert state["recurrent"].shape == (2, 2, layer.head_v_dim + 1, features)


def test_normalised_output_is_a_mean_of_values():
    layer = make("linear_attention", DOUBLE, feature_map="elu", normalizer=True, output_gate=False)
    with torch.no_grad():
        layer.v_proj.weight.zero_()
        layer.v_proj.weight[:, 0] = torch.arange(16)
        x = inputs(1, 9, DOUBLE)
        x[..., 0] = 1.0
        expected = layer.o_proj(torch.arange(16).double()).expand(1, 9, HIDDEN)
        torch.testing.assert_close(layer(x)[0], expected)


def test_the_map_replaces_silu_on_q_and_k_only():
    x = inputs(1, 9)
    by_default, by_name = make("deltanet"), make("deltanet", feature_map="silu", qk_norm="l2")
    by_name.load_state_dict(by_default.state_dict())
    assert relative_rms(by_name(x)[0], by_default(x)[0]) <= 1e-6
    other = make("deltanet", feature_map="relu")
    other.load_state_dict(by_default.state_dict())
    assert relative_rms(other(x)[0], by_default(x)[0]) > 1e-3


def test_random_features_are_saved_with_the_layer():
    layer = make("linear_attention", feature_map="performer")
    other = make("linear_attention", feature_map="performer")
    other.qk_map.random.normal_()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(inputs(1, 5))[0], layer(inputs(1, 5))[0])


@pytest.mark.parametrize("feature_map", ["taylor", "random_fourier", "hedgehog", "cosformer"])
def test_maps_compute_in_float32(feature_map):
    exact = make("linear_attention", feature_map=feature_map, head_k_dim=8)
    layer = make("linear_attention", torch.bfloat16, feature_map=feature_map, head_k_dim=8)
    x = inputs(1, 12)
    y, _ = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert relative_rms(y, exact(x)[0]) < 0.05
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_rms(exact(x)[0], exact(x.clone())[0].detach()) < 0.05


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("linear_attention", {"feature_map": "elu1"}, "got 'elu1': did you mean 'elu'?"),
        ("deltanet", {"qk_norm": "L2"}, "qk_norm must be one of none, l1, l2, got 'L2'"),
        ("gla", {"feature_map": "elu"}, "feature_map must be None for gla, got 'elu'"),
        ("kda", {"qk_norm": "l1"}, "qk_norm must be None for kda, got 'l1'"),
        ("deltanet", {"normalizer": True}, "normalizer must be None or False for deltanet"),
        ("mlstm", {"normalizer": False}, "normalizer must be None or True for mlstm"),
        ("gla", {"normalizer": True}, "normalizer must be None or False for gla"),
        ("linear_attention", {"normalizer": 1}, "normalizer must be True, False or None, got 1"),
        ("linear_attention", {"normalizer": True}, "which feature_map='identity' may make zero"),
        ("gated_rfa", {"feature_map": "silu"}, "choose one of elu, relu, dpfp, taylor"),
    ],
)
def test_undefined_combinations_are_refused(name, options, message):
    with pytest.raises(ValueError) as error:
        MIXERS[name](HIDDEN, num_heads=2, **options)
    assert message in str(error.value)


def test_from_config():
    words = config(feature_map="dpfp", qk_norm="l1", normalizer=True, conv_size=0)
    layer = MIXERS["linear_attention"].from_config(words, 0)
    assert (layer.qk_norm, layer.normalizer, layer.qk_map.features) == ("l1", True, 32)
    layer = MIXERS["deltanet"].from_config(words, 0)
    assert (layer.qk_norm, layer.normalizer, layer.qk_map.features) == ("l1", False, 32)
    assert MIXERS["gla"].from_config(words, 0).qk_map is None
