"""What single layers have beyond the frame: their gates, norms, widths and starting values."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from deltarule import nn
from deltarule.nn import MIXERS, RULES, State
from deltarule.nn.call import LayerCall
from deltarule.nn.layout import make_layout
from deltarule.ops.delta_rule import definition
from nn.layers import HIDDEN, LINEAR, NAMES, config, inputs, make
from oracles import mlstm
from oracles.lifted import each_head
from tolerance import relative_rms


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


def test_gated_deltanet_by_hand():
    """Every step of the frame once more, in plain PyTorch."""
    layer, x = make("gated_deltanet", torch.float64), inputs(1, 10, torch.float64)
    with torch.no_grad():
        q, k, v = (conv(layer, name, getattr(layer, f"{name}_proj")(x)) for name in "qkv")
        q, k, v = (t.view(1, 10, heads, 8) for t, heads in ((q, 2), (k, 2), (v, 4)))
        dt = F.softplus(layer.a_proj(x) + layer.dt_bias)
        o, _ = definition.delta_rule(
            q, k, v, beta=torch.sigmoid(layer.b_proj(x)), log_decay=-layer.A_log.exp() * dt,
            normalize_qk=True,
        )  # fmt: skip
        o = o / torch.sqrt((o * o).mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight
        expected = layer.o_proj(o.flatten(-2) * F.silu(layer.g_proj(x)))
        assert relative_rms(layer(x)[0], expected) <= 1e-12


def conv(layer, name, x):
    weight = getattr(layer, f"{name}_conv").weight
    return F.silu(F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], groups=len(weight))).mT


def mlstm_cell(*inputs):
    o, (C, _, _) = mlstm.recurrence(*inputs, eps=1e-6)
    return o, C


def test_mlstm_by_hand():
    """arXiv 2405.04517, section 2.3: the cell, norm, output gate."""
    layer, x = make("mlstm", torch.float64), inputs(1, 10, torch.float64)
    with torch.no_grad():
        q, k, v = (getattr(layer, f"{name}_proj")(x).view(1, 10, 2, 8) for name in "qkv")
        i, f = layer.b_proj(x) + layer.beta_bias, layer.a_proj(x) + layer.decay_bias
        (read, C), rows = each_head(mlstm_cell, q, k, v, i, f), []
        for h in read[0]:
            h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, False, keepdim=True) + 1e-5).sqrt()
            rows.append(h.flatten() * layer.o_norm.weight + layer.o_norm.bias)
        expected = layer.o_proj(torch.stack(rows) * torch.sigmoid(layer.g_proj(x[0])))
        y, state = layer(x)
        assert relative_rms(y[0], expected) <= 1e-12
        # Both are e^-m times the paper's.
        assert relative_rms(state["recurrent"][:, :, :-1], C * 8**0.5) <= 1e-12


def test_gated_deltanet2_by_hand():
    """Which projection feeds which gate: the erase the keys' channels, the write the values'."""
    layer, x = make("gated_deltanet2", torch.float64), inputs(1, 10, torch.float64)
    with torch.no_grad():
        q, k, v = (conv(layer, name, getattr(layer, f"{name}_proj")(x)) for name in "qkv")
        q, k, v = (t.view(1, 10, 2, 8) for t in (q, k, v))
        q, k = definition.unit_norm(q), definition.unit_norm(k)
        dt = F.softplus(layer.a_proj(x).view(1, 10, 2, 8) + layer.dt_bias)
        log_decay = -layer.A_log.exp()[:, None] * dt
        b, w = (torch.sigmoid(p(x)).view(1, 10, 2, 8) for p in (layer.erase_proj, layer.write_proj))
        o, _ = definition.dplr(
            q, k, w * v, a=-log_decay.exp() * b * k, b=k, log_decay=log_decay
        )  # fmt: skip
        o = o / torch.sqrt((o * o).mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight
        expected = layer.o_proj(o.flatten(-2) * torch.sigmoid(layer.g_proj(x)))
        assert relative_rms(layer(x)[0], expected) <= 1e-12


def test_mamba2_gates_before_its_norm():
    layer, x = make("mamba2", torch.float64), inputs(1, 10, torch.float64)
    with torch.no_grad():
        C, B, X = (conv(layer, name, getattr(layer, f"{name}_proj")(x)) for name in "qkv")
        dt = F.softplus(layer.a_proj(x) + layer.dt_bias)
        X = X.view(1, 10, 4, 16)
        y, _ = definition.delta_rule(
            C[:, :, None], B[:, :, None], X * dt[..., None], beta=None,
            log_decay=-layer.A_log.exp() * dt, scale=1.0,
        )  # fmt: skip
        y = (y + layer.D[:, None] * X).flatten(-2) * F.silu(layer.g_proj(x))
        y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight
        assert relative_rms(layer(x)[0], layer.o_proj(y)) <= 1e-12


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


@pytest.mark.parametrize("name", LINEAR)
def test_default_widths(name):
    layer = MIXERS[name](64, num_heads=2)
    widths = {
        "retnet": (32, 64), "gated_retnet": (32, 64), "mamba2": (128, 64), "gla": (16, 32),
        "gated_deltanet": (24, 48), "gated_delta_product": (24, 48), "comba": (24, 48),
        "comba_released": (24, 48), "xlstm_7b": (16, 32),
    }  # fmt: skip
    assert (layer.head_k_dim, layer.head_v_dim) == widths.get(name, (32, 32))
    assert layer.conv_size == (0 if name in NO_CONVOLUTION else 4)
    assert (layer.g_proj is None) == (name in UNGATED or name.startswith("multi_"))


@pytest.mark.parametrize("name", ["gated_deltanet", "gated_delta_product"])
def test_only_the_keys_have_to_divide_into_heads(name):
    with torch.device("meta"):
        layer = MIXERS[name](1024, num_heads=6)
    assert (layer.head_k_dim, layer.head_v_dim) == (128, 256)


def test_retnet_takes_its_wavelengths_from_the_config():
    x = inputs(1, 40)
    layer, other = (nn.RetNet.from_config(config(rope_theta=theta), 0) for theta in (1e4, 10.0))
    other.load_state_dict(layer.state_dict())
    assert relative_rms(other(x)[0], layer(x)[0]) > 0.01
    other.rope_theta = 1e4
    assert torch.equal(other(x)[0], layer(x)[0])
    assert nn.RetNet(HIDDEN, num_heads=2).rope_theta == 1e4


UNGATED = ("linear_attention", "gated_rfa", "hgrn2", "deltanet", "delta_product", "block_deltanet")
SHIFTED = ("rwkv6", "rwkv7")
NO_CONVOLUTION = (
    "linear_attention", "gated_rfa", "retnet", "gated_retnet", "lightning", "gla", "gate_loop",
    "hgrn2", "mlstm", "xlstm_7b", *SHIFTED,
)  # fmt: skip


@pytest.mark.parametrize("name", [n for n in LINEAR if n not in SHIFTED])
def test_convolution_is_an_option(name):
    x = inputs(1, 5)
    assert "q_conv" in make(name, conv_size=3).init_state(1)
    without = make(name, conv_size=0)
    assert "q_conv" not in without.init_state(1)
    assert without(x)[0].shape == x.shape


@pytest.mark.parametrize("name", LINEAR)
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
