"""What the layers of a model hand on: the first values of RWKV-7, the bounds of HGRN and HGRN-2."""

import torch
import torch.nn.functional as F

from deltarule.models import CausalLM, ModelConfig
from deltarule.nn import HGRN2, MIXERS, RWKV7
from nn.layers import HIDDEN, config, inputs, make
from oracles import hgrn


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


def test_bounds_rise_from_layer_to_layer():
    layers = config(layer_types=("hgrn2", "attention", "hgrn2", "hgrn2"), num_layers=4)
    first, second, third = (HGRN2.from_config(layers, index) for index in (0, 2, 3))
    assert first.bound_logits.shape == (3, 2, 16)
    assert second.bound_logits is None
    with torch.no_grad():
        first.bound_logits.normal_()
    shared = {}
    assert first.lower_bound(shared) is None
    share = first.bound_logits.softmax(0)
    torch.testing.assert_close(second.lower_bound(shared), share[1])
    torch.testing.assert_close(third.lower_bound(shared), share[1] + share[2])
    assert (third.lower_bound(shared) < 1).all()
    assert second.lower_bound({}) is None


def test_the_bound_keeps_what_would_be_forgotten():
    layers = config(layer_types=("hgrn2",) * 2, num_layers=2)
    first, second = (HGRN2.from_config(layers, index) for index in range(2))
    x, shared = inputs(1, 9), {}
    first(x, shared=shared)
    assert not torch.equal(second(x, shared=shared)[0], second(x)[0])


def test_the_model_learns_its_bounds():
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "hidden_size": 32, "num_layers": 2, "num_heads": 2}
    model = CausalLM(ModelConfig(layer_types="hgrn2", **sizes))
    model(torch.randint(9, (2, 12)))[0].square().sum().backward()
    bounds = model.blocks[0].mixer.bound_logits
    assert bounds.dtype == torch.float32
    assert (bounds.grad != 0).any()


def test_hgrn_bounds_are_those_of_the_paper():
    layer, shared = MIXERS["hgrn"](HIDDEN, num_heads=2), {}
    layer.find_place(("hgrn", "attention", "hgrn", "hgrn"), 0)
    torch.nn.init.normal_(layer.bound_logits)
    expected = hgrn.lower_bounds(layer.bound_logits.flatten(1))
    layer.lower_bound(shared)
    later = MIXERS["hgrn"](HIDDEN, num_heads=2)
    later.find_place(("hgrn", "attention", "hgrn", "hgrn"), 3)
    torch.testing.assert_close(later.lower_bound(shared).flatten(), expected[2])


def test_alone_it_has_none():
    layer = make("hgrn2")
    assert layer.bound_logits is None
    assert layer.lower_bound({}) is None
