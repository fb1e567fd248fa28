"""The papers' grid: every feature map with every norm, in every layer that has them."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import deltarule
from deltarule.nn import MIXERS, RULES
from deltarule.nn.feature_maps import FEATURE_MAPS, LONGEST, NORMS
from deltarule.nn.rule import Projections
from nn.layers import (
    HV,
    B,
    H,
    K,
    T,
    V,
    config,
    draw,
    draw_projections,
    inputs,
    largest_error,
    make,
    run,
)
from nn.test_recurrences import by_hand
from oracles import dijiang, rebased
from tolerance import relative_rms

DOUBLE = torch.float64
LAYERS = [name for name, layer in MIXERS.items() if getattr(layer, "maps_features", False)]
WHOLE = ["linear_attention", "gated_rfa", "deltanet", "delta_product"]
# The other delta layers share their code: the pairs of Gated DeltaNet's ablation, and one map each
# with a weight and with more features than channels.
ABLATION = [("relu", "l1"), ("elu", "l1"), ("silu", "l1"), ("relu", "l2"), ("elu", "l2")]
OTHERS = [*ABLATION, ("hedgehog", "l2"), ("dpfp", "none")]
# Each channel of their keys has a gate of its own.
KEEPS_CHANNELS = ["kda", "gated_deltanet2"]
GRID = [
    *(
        words
        for words in itertools.product(WHOLE, FEATURE_MAPS, NORMS)
        if words[0] != "gated_rfa" or FEATURE_MAPS[words[1]].divides
    ),
    *(
        (name, *words)
        for name in LAYERS
        if name not in WHOLE
        for words in (ABLATION if name in KEEPS_CHANNELS else OTHERS)
    ),
]


def test_layers_of_the_grid():
    delta = {name for name, rule in RULES.items() if rule.erase != "none"} - {"rwkv7"}
    assert set(LAYERS) == delta | set(WHOLE)


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


def test_from_config():
    words = config(feature_map="dpfp", qk_norm="l1", normalizer=True, conv_size=0)
    layer = MIXERS["linear_attention"].from_config(words, 0)
    assert (layer.qk_norm, layer.normalizer, layer.qk_map.features) == ("l1", True, 32)
    layer = MIXERS["deltanet"].from_config(words, 0)
    assert (layer.qk_norm, layer.normalizer, layer.qk_map.features) == ("l1", False, 32)
    assert MIXERS["gla"].from_config(words, 0).qk_map is None


def mapped(name, x, weight=None, position=None):
    return FEATURE_MAPS[name].function(x, weight, position)


def arguments_of(name, channels=K):
    """A weight and a position, where the map needs them."""
    entry = FEATURE_MAPS[name]
    pairs = name in ("rebased", "dijiang")
    weight = None if entry.weight == "none" else draw(H, 2 if pairs else channels, channels)
    return weight, torch.arange(T).expand(B, T) if entry.positional else None


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_sizes_signs_and_gradients(name):
    entry, x = FEATURE_MAPS[name], draw(B, T, H, K).requires_grad_()
    features = mapped(name, x, *arguments_of(name))
    assert features.shape == (B, T, H, entry.size(K))
    if name in ("elu", "relu", "dpfp", "hedgehog", "performer"):
        assert (features >= 0).all()
    features.square().sum().backward()
    assert x.grad.isfinite().all()
    assert entry.source


def dpfp(x, W):
    r = torch.cat([x.clamp(min=0), (-x).clamp(min=0)], dim=-1)
    return torch.stack([r[..., i] * r[..., i - 1] for i in range(2 * K)], dim=-1)


def hedgehog(x, W):
    y = torch.stack([x[:, :, h] @ W[h] for h in range(H)], dim=2)
    both = torch.cat([y.exp(), (-y).exp()], dim=-1)
    return both / both.sum(-1, keepdim=True)


WRITTEN_OUT = {
    "identity": lambda x, W: x, "elu": lambda x, W: torch.where(x > 0, x + 1, x.exp()),
    "relu": lambda x, W: x.clamp(min=0), "silu": lambda x, W: x / (1 + torch.exp(-x)),
    "dpfp": dpfp, "hedgehog": hedgehog,
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_maps_written_out(name):
    x, W = draw(B, T, H, K), draw(H, K, K)
    torch.testing.assert_close(mapped(name, x, W), WRITTEN_OUT[name](x, W))


def test_taylor_is_the_second_order_of_exp():
    q, k = draw(B, T, H, K), draw(B, T, H, K)
    s = (q * k).sum(-1) / math.sqrt(K)
    product = (mapped("taylor", q) * mapped("taylor", k)).sum(-1)
    torch.testing.assert_close(product, 1 + s + s * s / 2)


def divided_linear_attention(q, k, v):
    """One head of the layer's rule with the normaliser, by the definition."""
    p = Projections(q=q[None, :, None], k=k[None, :, None], v=v[None, :, None], normalizer=True)
    return run(RULES["linear_attention"], p)[0, :, 0]


def test_rebased_as_its_authors_sum_it():
    q, k, weight = draw(T, K), draw(T, K), draw(1, 2, K)
    expected, _ = rebased.recurrence(
        rebased.transform(q, *weight[0]), rebased.transform(k, *weight[0]), v := draw(T, V), eps=0
    )
    q, k = (mapped("rebased", x[None, :, None], weight)[0, :, 0] for x in (q, k))
    assert largest_error(divided_linear_attention(q, k, v), expected) <= 1e-10


def test_dijiang_as_printed():
    q, k, t, scale = draw(T, K), draw(T, K), draw(K), draw(K).abs()
    weight = torch.stack([t, scale])[None]
    phi_q, phi_k = (mapped("dijiang", x[None, :, None], weight)[0, :, 0] for x in (q, k))
    assert largest_error(phi_q, dijiang.features(q, t, scale)) <= 1e-12
    expected, _ = dijiang.recurrence(phi_q, phi_k, v := draw(T, V))
    assert largest_error(divided_linear_attention(phi_q, phi_k, v), expected) <= 1e-10


@pytest.mark.parametrize("name", ["random_fourier", "performer"])
def test_random_features_approximate_their_kernel(name):
    q, k = draw(1, 1, 1, K), draw(1, 1, 1, K)
    weight = draw(1, K, 200_000)
    product = (mapped(name, q, weight) * mapped(name, k, weight)).sum()
    if name == "random_fourier":
        distance = F.normalize(q, dim=-1) - F.normalize(k, dim=-1)
        expected = torch.exp(-distance.square().sum() / 2)
    else:
        expected = torch.exp((q * k).sum() / math.sqrt(K))
    torch.testing.assert_close(product, expected, rtol=0.05, atol=0.01)


def test_cosformer_weighs_by_the_distance():
    q, k = draw(B, T, H, K), draw(B, T, H, K)
    position = torch.tensor([0, 3, 7, 50, 51, 400, 900, 2000, 4000]).expand(B, T)
    product = torch.einsum(
        "bthm,bshm->bhts",
        mapped("cosformer", q, None, position),
        mapped("cosformer", k, None, position),
    )
    distance = (position[0][:, None] - position[0][None, :]).double()
    cosine = torch.cos(math.pi / 2 * distance / LONGEST)
    expected = torch.einsum("bthk,bshk->bhts", q.relu(), k.relu()) * cosine
    torch.testing.assert_close(product, expected)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["linear_attention", "deltanet"])
def test_norm_of_queries_and_keys(name, norm):
    """What is divided first needs no norm; those by default are in test_recurrences.py."""
    p = draw_projections(beta_logits=draw(B, T, HV), qk_norm=norm)
    q, k = (divided(x, norm) for x in (p.q, p.k))
    expected = run(RULES[name], replace(p, q=q, k=k, qk_norm="none"))
    assert largest_error(run(RULES[name], p), expected) <= 1e-12


def divided(x, norm):
    if norm == "l1":
        return x / (x.abs().sum(-1, keepdim=True) + 1e-6)
    return x if norm == "none" else x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def test_normaliser_divides_by_the_sum_of_similarities():
    """arXiv 2006.16236, eq. 12: sum_j sim(q_i, k_j) v_j / sum_j sim(q_i, k_j)."""
    p = draw_projections(normalizer=True)
    p.q.abs_()
    p.k.abs_()

    def divided(h):
        similarity = (h.q @ h.k.mT).tril()
        return similarity @ h.v / similarity.sum(1, keepdim=True)

    assert largest_error(run(RULES["linear_attention"], p), by_hand(divided, p)) <= 1e-12


def test_normaliser_of_nothing_is_nothing():
    p = draw_projections(normalizer=True)
    p.k.zero_()
    assert (run(RULES["linear_attention"], p) == 0).all()


@pytest.mark.parametrize("norm", ["head", "all", "none"])
@pytest.mark.parametrize("name", ["gated_deltanet", "kda", "delta_product"])
def test_norms_of_the_output(name, norm):
    """Of each head, of all heads together, and none; the gate comes after."""
    layer = make(name, DOUBLE, output_norm=norm)
    o = torch.randn(2, 3, layer.num_v_heads, layer.head_v_dim, dtype=DOUBLE)
    gate = torch.randn_like(o)
    wide = o if norm == "head" else o.flatten(-2)
    expected = wide
    if norm != "none":
        expected = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        expected = expected * layer.o_norm.weight
    activated = torch.sigmoid(gate) if layer.gate_activation == "sigmoid" else F.silu(gate)
    expected = expected.reshape(2, 3, -1) * activated.flatten(-2)
    assert relative_rms(layer.normed(o, gate), expected) <= 1e-12
    assert layer(inputs(1, 4, DOUBLE))[0].isfinite().all()
