"""What single layers have beyond the frame: options, gates, and where they fall together."""

import os
import subprocess
import sys

import pytest
import torch

from deltarule import nn
from deltarule.nn import RULES, State
from deltarule.nn.call import LayerCall
from deltarule.nn.layout import make_layout
from deltarule.ops.delta_rule import definition
from nn.layers import HIDDEN, LINEAR, NAMES, config, inputs, make
from tolerance import relative_rms


def test_mamba2_from_config_has_one_key_head():
    layer = nn.Mamba2.from_config(config(num_heads=4), 0)
    assert (layer.num_heads, layer.num_v_heads) == (1, 4)
    assert (layer.head_k_dim, layer.head_v_dim) == (128, 16)


def test_delta_product_of_one_step_is_deltanet():
    x, given = inputs(1, 9), {"num_heads": 2, "head_k_dim": 8}
    product = nn.DeltaProduct(HIDDEN, n_steps=1, beta_max=1.0, **given)
    plain = nn.DeltaNet(HIDDEN, **given)
    plain.load_state_dict(product.state_dict())
    assert torch.equal(plain(x)[0], product(x)[0])


@pytest.mark.parametrize("name", [name for name in LINEAR if RULES[name].erase == "tied"])
def test_beta_max_doubles_the_write_strength(name, monkeypatch):
    seen = []

    def record(*args, beta, save_states, **others):
        assert save_states
        seen.append(beta)
        return definition.delta_rule(*args, beta=beta, **others)

    monkeypatch.setitem(nn.delta_mixer.OPERATORS, "delta_rule", record)
    one, two = make(name, beta_max=1.0), make(name, beta_max=2.0)
    two.load_state_dict(one.state_dict())
    one(inputs(1, 5))
    two(inputs(1, 5))
    if name != "longhorn":
        assert torch.equal(2 * seen[0], seen[1])
    assert (seen[1] > seen[0]).all()


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


@pytest.mark.parametrize("name", ["gated_deltanet2", "comba", "comba_released"])
def test_beta_max_bounds_a_free_erase(name):
    one, two = make(name, beta_max=1.0), make(name, beta_max=2.0)
    two.load_state_dict(one.state_dict())
    calls = [layer.project(make_call(layer, inputs(1, 5))) for layer in (one, two)]
    erases = [RULES[name].arguments(projections)["a"] for projections in calls]
    torch.testing.assert_close(2 * erases[0], erases[1])


FIRST_CALLS = """
import sys
import torch
from nn.layers import NAMES, inputs, make

COMPILER = {"torch._dynamo", "torch._inductor", "sympy"}
for name in NAMES:
    y, state = make(name)(inputs(2, 40).requires_grad_())
    y.sum().backward()
    with torch.no_grad():
        make(name)(inputs(2, 1), state)
    if loaded := COMPILER & set(sys.modules):
        print(name, *loaded)
        COMPILER -= loaded
"""


def test_no_first_call_loads_the_compiler():
    """Which takes a second; a process of its own runs every layer, and says who has loaded it."""
    given = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FIRST_CALLS]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=given)
    assert done.stdout == ""


def make_call(layer, x):
    layout = make_layout(x, None, None)
    return LayerCall(x, layout, layer.init_state(len(x)), State(), {})


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
