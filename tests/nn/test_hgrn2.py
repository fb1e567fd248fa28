"""HGRN-2's lower bounds, which all layers of a model share."""

import torch

from deltarule.models import CausalLM, ModelConfig
from deltarule.nn import HGRN2
from nn.layers import config, inputs, make


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


def test_alone_it_has_none():
    layer = make("hgrn2")
    assert layer.bound_logits is None
    assert layer.lower_bound({}) is None


def test_a_convolution_leaves_the_decay_logits_their_sign():
    layer = make("hgrn2", conv_size=4)
    kinds = {name: getattr(layer, f"{name}_conv").activated for name in "qkv"}
    assert kinds == {"q": True, "k": False, "v": False}
