"""What single layers have beyond the frame: options, gates, what they hand on, and memories."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from deltarule import delta_rule, nn
from deltarule.nn import MIXERS, RULES, RWKV7, TitansLinear, TTTLinear
from nn.layers import HIDDEN, LINEAR, NAMES, call_of, config, inputs, make
from oracles import hgrn
from small import small_model
from tolerance import assert_close, relative_rms


def test_sizes_that_are_a_layers_own():
    layer = nn.Mamba2.from_config(config(num_heads=4), 0)
    assert (layer.num_heads, layer.num_v_heads) == (1, 4)
    assert (layer.head_k_dim, layer.head_v_dim) == (128, 16)
    layer = TTTLinear.from_config(config(head_k_dim=6, head_v_dim=4), 0)
    assert layer.head_v_dim == layer.head_k_dim == 6
    layer = TitansLinear(HIDDEN, num_heads=2, head_k_dim=8, head_v_dim=4, output_gate=False)
    assert layer(inputs(1, 5))[1]["recurrent"].shape == (1, 2, 4, 8)


@pytest.mark.parametrize("name", ["gated_deltanet", "mamba1", "mesa", "slstm", "hyena"])
def test_a_second_derivative_of_a_layer_is_refused_with_what_to_do_instead(name):
    layer, x = make(name, torch.float64), inputs(1, 5, torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x)[0].sin().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="a layer takes no impl: use differences of"):
        gradient.sum().backward()


def test_differences_of_a_layers_gradients_are_its_second_derivative(monkeypatch):
    layer, x = make("gated_deltanet", torch.float64), inputs(1, 5, torch.float64).requires_grad_()
    along, step = torch.randn_like(x), 2**-17

    def gradient(x, again=False):
        return torch.autograd.grad(layer(x)[0].sin().sum(), x, create_graph=again)[0]

    ahead, behind = (gradient(x + side * step * along) for side in (1, -1))
    reference = partial(delta_rule, impl="reference")
    monkeypatch.setitem(nn.delta_mixer.OPERATORS, "delta_rule", reference)
    (exact,) = torch.autograd.grad(gradient(x, again=True), x, along)
    assert_close((ahead - behind) / (2 * step), exact, dtype=torch.float32, gradient=True)


@pytest.mark.parametrize("name", [name for name in LINEAR if MIXERS[name].takes("beta_max")])
def test_beta_max_doubles_the_write_strength(name):
    """Of a free erase, what it erases with."""
    one, two = make(name, beta_max=1.0), make(name, beta_max=2.0)
    two.load_state_dict(one.state_dict())
    calls = [layer.project(call_of(layer, inputs(1, 5))) for layer in (one, two)]
    strength = "a" if RULES[name].operator == "dplr" else "beta"
    once, twice = (RULES[name].arguments(projections)[strength] for projections in calls)
    if name == "longhorn":
        assert (twice > once).all()
    else:
        torch.testing.assert_close(2 * once, twice)


def test_retnet_takes_its_wavelengths_from_the_config():
    x = inputs(1, 40)
    layer, other = (nn.RetNet.from_config(config(rope_theta=theta), 0) for theta in (1e4, 10.0))
    other.load_state_dict(layer.state_dict())
    assert relative_rms(other(x)[0], layer(x)[0]) > 0.01
    other.rope_theta = 1e4
    assert torch.equal(other(x)[0], layer(x)[0])
    assert nn.RetNet(HIDDEN, num_heads=2).rope_theta == 1e4


SHIFTED = ("rwkv6", "rwkv7")
SCANS = ["mamba1", "s4", "longhorn_released", "dfw", "abc", "gsa"]


@pytest.mark.parametrize("name", [n for n in LINEAR + SCANS if n not in SHIFTED])
def test_convolution_is_an_option(name):
    x = inputs(1, 5)
    assert "v_conv" in make(name, conv_size=3).init_state(1)
    without = make(name, conv_size=0)
    assert "v_conv" not in without.init_state(1)
    assert without(x)[0].shape == x.shape


@pytest.mark.parametrize("name", LINEAR + SCANS)
def test_output_gate_is_an_option(name):
    x = inputs(1, 5)
    gated, plain = make(name, output_gate=True), make(name, output_gate=False)
    shared = {key: p for key, p in gated.state_dict().items() if "g_proj" not in key}
    plain.load_state_dict(shared)
    assert not torch.equal(gated(x)[0], plain(x)[0])


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name):
    layer = make(name)
    layer(inputs(2, 9), shared={"rwkv7_first_values": torch.randn(2, 9, 2, 8)})[0].sum().backward()
    for key, parameter in layer.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().sum() > 0, key


FIRST_CALLS = """
import sys
import tempfile
import torch
from deltarule.models import CausalLM, ModelConfig, count_parameters
from nn.layers import NAMES, inputs, make
from small import small_model

COMPILER = {"torch._dynamo", "torch._inductor", "sympy"}
for name, options in [*((name, {}) for name in NAMES), ("deltanet", {"feature_map": "elu"})]:
    y, state = make(name, **options)(inputs(2, 40).requires_grad_())
    y.sum().backward()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        make(name, **options)(inputs(2, 1), state)
        small_model(name, **options).save(folder)
        CausalLM.load(folder).generate([[1, 2]], max_new_tokens=2)
    sizes = {"vocab_size": 257, "hidden_size": 2048, "num_layers": 1, "num_heads": 16}
    count_parameters(ModelConfig(**sizes, layer_types=name, **options))
    if loaded := COMPILER & set(sys.modules):
        print(name, *loaded)
        COMPILER -= loaded
"""


def test_no_first_call_loads_the_compiler():
    """Which takes a second; a process of its own runs every layer, alone and in a model that is
    loaded and continues text, and says who has loaded it.
    """
    given = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FIRST_CALLS]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=given)
    assert done.stdout == ""


def test_a_convolution_leaves_the_decay_logits_their_sign():
    layer = make("hgrn2", conv_size=4)
    kinds = {name: getattr(layer, f"{name}_conv").activated for name in "qkv"}
    assert kinds == {"q": True, "k": False, "v": False}


@torch.no_grad()
def test_filters_end_where_they_are_said_to():
    layer, x = (
        make("hyena", torch.float64, filter_size=5, conv_size=0),
        inputs(1, 12, torch.float64),
    )
    y = layer(x)[0]
    changed = x.clone()
    changed[:, 3] += 1
    assert torch.equal(layer(changed)[0][:, 8:], y[:, 8:])
    assert not torch.equal(layer(changed)[0][:, 7], y[:, 7])


def test_the_first_layer_shares_its_values():
    first = RWKV7.from_config(config(), 0)
    second = RWKV7.from_config(config(), 1)
    x, shared = inputs(1, 5), {}
    first(x, shared=shared)
    values = shared["rwkv7_first_values"]
    assert torch.equal(values.flatten(-2), first.v_proj(shifted(first, x)))
    y, _ = second(x, shared=shared)
    assert torch.equal(shared["rwkv7_first_values"], values)
    assert not torch.equal(y, second(x)[0])


def shifted(layer, x):
    mix = layer.shift_mix[3]
    return torch.addcmul(x, F.pad(x, (0, 0, 1, -1)) - x, mix)


def test_the_first_of_its_kind_in_a_hybrid_needs_no_value_projection():
    layers = config(layer_types=("attention", "rwkv7", "rwkv7"))
    assert RWKV7.from_config(layers, 1).value_proj is None
    assert RWKV7.from_config(layers, 2).value_proj is not None


DOUBLE = torch.float64
NETWORKS = ["ttt_linear", "ttt_mlp", "titans_linear", "titans_mlp"]


@pytest.mark.parametrize("name", ["hgrn", "hgrn2"])
def test_bounds_are_those_of_the_paper_and_the_model_learns_them(name):
    layers = config(layer_types=(name, "attention", name, name), num_layers=4)
    first, second, third = (MIXERS[name].from_config(layers, index) for index in (0, 2, 3))
    assert second.bound_logits is third.bound_logits is None
    torch.nn.init.normal_(first.bound_logits)
    shared, expected = {}, hgrn.lower_bounds(first.bound_logits.flatten(1))
    assert first.lower_bound(shared) is None
    for layer, bound in ((second, expected[1]), (third, expected[2])):
        torch.testing.assert_close(layer.lower_bound(shared).flatten(), bound)
    alone = make(name)
    assert second.lower_bound({}) is alone.bound_logits is alone.lower_bound({}) is None
    model = small_model(name, name, hidden_size=32, num_heads=2)
    model(torch.randint(9, (2, 12)))[0].square().sum().backward()
    bounds = model.blocks[0].mixer.bound_logits
    assert bounds.dtype == torch.float32
    assert (bounds.grad != 0).any()


def test_mesa_solves_exactly_on_request():
    layer, x = make("mesa", DOUBLE), inputs(1, 21, DOUBLE)
    y, _ = layer(x)
    layer.iterations = None
    assert relative_rms(layer(x)[0], y) <= 1e-12
    layer.iterations = 1
    assert relative_rms(layer(x)[0], y) > 1e-3


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("momentum_logit", [-4.0, 4.0])
def test_equal_tokens_do_not_make_the_memory_grow_without_bound(name, momentum_logit):
    torch.manual_seed(0)
    layer = MIXERS[name](HIDDEN, num_heads=2)
    x = torch.ones(1, 1, HIDDEN)
    if hasattr(layer, "m_proj"):
        # The same momentum for every token: x is constant.
        layer.m_proj.weight.data.fill_(momentum_logit / HIDDEN)
    with torch.no_grad():
        _, early = layer(2 * x.expand(1, 1024, HIDDEN))
        y, late = layer(2 * x.expand(1, 4096, HIDDEN), early)
    assert y.isfinite().all()
    assert late["recurrent"].norm() < 10 * early["recurrent"].norm()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_memory_of_a_long_random_sequence_stays_alive(name):
    torch.manual_seed(0)
    layer = MIXERS[name](HIDDEN, num_heads=2)
    with torch.no_grad():
        _, state = layer(torch.randn(1, 4096, HIDDEN))
    assert 1e-2 < state["recurrent"].norm() / layer.starts[0].norm() < 1e2


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("size", [300, 1e6])
def test_large_inputs_do_not_make_the_memory_infinite(name, size):
    torch.manual_seed(0)
    layer, x = MIXERS[name](HIDDEN, num_heads=2), size * torch.randn(2, 512, HIDDEN)
    x[1] = x[1, :1] + 0.1 * x[1]
    y, state = layer(x)
    assert y.isfinite().all()
    assert all(maps.isfinite().all() for maps in state.values())
    y.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_says_how_long_mini_batches_are(name):
    layer = MIXERS[name].from_config(config(mini_batch=4), 0)
    assert layer(inputs(1, 7))[1]["position"].tolist() == [3]
    assert MIXERS[name].from_config(config(mini_batch=None), 0).mini_batch == 16
