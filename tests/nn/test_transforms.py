"""Layers without numbers, over stacked parameters, and written to disk whole."""

import io
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, stack_module_state

from deltarule.models import CausalLM, ModelConfig, next_token_loss
from deltarule.nn.feature_maps import FEATURE_MAPS
from nn.layers import HIDDEN, NAMES, inputs, make
from small import small_model


def run(layer, x):
    """A call, one that goes on, and one with padding; the outputs' shape and device."""
    y, state = layer(x)
    layer(x[:, :1], state)
    mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    padded, _ = layer(x, mask=mask)
    y.sum().backward()
    assert padded.shape == y.shape == x.shape
    return y


@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward_on_the_meta_device(name):
    layer = make(name).to("meta")
    assert run(layer, torch.empty(2, 9, HIDDEN, device="meta")).device.type == "meta"
    assert all(p.grad is None or p.grad.shape == p.shape for p in layer.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_models_take_fake_tokens_and_offsets(name):
    with FakeTensorMode():
        model = small_model(name, window=4)
        tokens = torch.randint(257, (1, 9))
        _, state = model(tokens)
        model(tokens, state, mask=torch.ones(1, 9, dtype=torch.bool))
        packed, _ = model(tokens, cu_seqlens=torch.tensor([0, 3, 9]))
        next_token_loss(packed, tokens).backward()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", NAMES)
def test_vmap_over_the_parameters_of_models(name):
    options = {"sliding_window": {"window": 4}}.get(name, {})
    stream = {"vocab_size": 11, "hidden_size": 16, "mlp_size": 16, "num_layers": 2}
    heads = {"num_heads": 2, "head_k_dim": 4, "head_v_dim": 4}
    config = ModelConfig(layer_types=name, **stream, **heads, **options)
    models = [CausalLM(config) for _ in range(2)]
    tokens = torch.randint(11, (1, 6))
    parameters, buffers = stack_module_state(models)

    def logits(parameters, buffers):
        return functional_call(models[0], (parameters, buffers), (tokens,))[0]

    both = torch.vmap(logits)(parameters, buffers)
    for found, model in zip(both, models, strict=True):
        torch.testing.assert_close(found, model(tokens)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gated_rfa", *NAMES[::5]])
def test_layers_are_pickled(name):
    layer, x = make(name), inputs(1, 4)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x)[0], layer(x)[0])


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_layers_with_any_feature_map_are_saved_whole(feature_map):
    layer, x, file = make("linear_attention", feature_map=feature_map), inputs(1, 4), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x)[0], layer(x)[0])
