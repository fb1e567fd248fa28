"""A block of one token by few kernels: the numbers of the block."""

import pytest
import torch

from deltarule import nn
from deltarule.models.adjoined import adjoin_projections
from deltarule.nn import ModelState, delta_mixer, few_rows, short_conv
from deltarule.nn.short_conv import within_product
from deltarule.nn.state import LentState
from gluon_interpreter import interpret_launches
from tolerance import relative_rms


@pytest.mark.parametrize("name", ["gated_deltanet", "deltanet", "gated_delta_product"])
def test_a_block_of_one_token_is_the_block(name, device, make_model, monkeypatch):
    model = make_model(layer_types=name).to(device)
    with torch.no_grad():
        _, state = model(torch.randint(257, (1, 9), device=device))
        x = torch.randn(1, 1, model.config.hidden_size, device=device)
        for block, layer in zip(model.blocks, state, strict=True):
            given = x, 0.1 * x, layer, None, None, {}
            with monkeypatch.context() as patch:
                patch.setattr(nn.one_token, "fits", lambda *_: False)
                stream, branch, after = block(*given)
                wanted = stream + branch
            if device == "cpu":
                monkeypatch.setattr(nn.one_token, "fits", lambda *_: True)
            found, none, after_one = block(*given)
            assert none is None
            assert relative_rms(found, wanted) < 2e-6
            for key, tensor in after.items():
                assert relative_rms(after_one[key], tensor) < 2e-6


@pytest.mark.parametrize(
    "options", [{"deepnorm_alpha": 2.0}, {"post_norm": "gated_deltanet"}, {"output_norm": "all"}]
)
def test_blocks_whose_norms_stand_elsewhere_take_the_usual_way(options, make_model, monkeypatch):
    model = make_model(layer_types="gated_deltanet", **options)
    monkeypatch.setattr(nn.one_token, "fits", lambda *_: True)
    with torch.no_grad():
        whole, _ = model(tokens := torch.randint(257, (1, 9)))
        _, state = model(tokens[:, :8])
        assert relative_rms(model(tokens[:, 8:], state)[0][:, 0], whole[:, 8]) < 2e-6


def test_hooked_and_strange_parts_take_the_usual_way(make_model, monkeypatch):
    block = make_model(layer_types="gated_deltanet").blocks[0]
    for x in (block.mixer_norm, block.mixer.o_norm):
        assert nn.one_token.is_plain_norm(x)
        handle = x.register_forward_hook(lambda *_: None)
        assert not nn.one_token.is_plain_norm(x)
        handle.remove()
    assert not nn.one_token.is_plain_norm(torch.nn.LayerNorm(3))
    assert not nn.one_token.is_plain_norm(nn.RMSNorm(3, zero_centered=True))


def test_a_product_convolves_what_it_makes(make_model, monkeypatch):
    options = {"hidden_size": 256, "num_heads": 2, "head_k_dim": 64, "head_v_dim": 128}
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    device = "cuda" if hopper else "cpu"
    model = make_model(layer_types="gated_deltanet", num_layers=2, **options).to(device)
    tokens = torch.randint(257, (3, 10), device=device)
    with torch.no_grad():
        exact, exact_after = model(tokens[:, 9:], model(tokens[:, :9])[1])
        model.bfloat16()
        adjoin_projections(model, tuple(model.parameters()))
        _, state = model(tokens[:, :9])
        theirs, theirs_after = model(tokens[:, 9:], state)
        made = []
        note = lambda *given: made.append(within_product(*given)) or made[-1]  # noqa: E731
        monkeypatch.setattr(delta_mixer, "within_product", note)
        if not hopper:
            interpret_launches(monkeypatch, torch.initial_seed, roles=False)
            monkeypatch.setattr(short_conv, "why_not_fused", lambda x: None)
            for module in (few_rows, delta_mixer):
                monkeypatch.setattr(module, "kernel_rows", lambda x, *_: x.numel() // x.shape[-1])
        lent = ModelState(LentState(layer.clone()) for layer in state)
        found, after = model(tokens[:, 9:], lent)
    assert len(made) == len(model.blocks)
    assert None not in made
    # Triton's interpreter rounds towards zero.
    assert relative_rms(found, exact) < 2 * relative_rms(theirs, exact)
    for layer, expected, other in zip(after, exact_after, theirs_after, strict=True):
        for name, x in expected.items():
            assert relative_rms(layer[name], x) < 2 * relative_rms(other[name], x)
