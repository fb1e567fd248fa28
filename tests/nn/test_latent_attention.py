"""Latent attention beside its definition in float64, in both of its forms."""

import pytest
import torch

from deltarule.models import CausalLM, ModelConfig
from deltarule.nn import LatentAttention
from models.checkpoints import check_ways_of_reading
from tolerance import relative_rms

HEAD = {"qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 6}
SIZES = {"num_heads": 3, "kv_lora_rank": 8} | HEAD


def make(**options):
    torch.manual_seed(0)
    layer = LatentAttention(16, **SIZES | options).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return layer


def turned(x, position, theta):
    """Channel i with i + D/2, by position theta^(-2i/D)."""
    half = len(x) // 2
    angle = position * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x[:half], x[half:]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
    )


def definition(layer, x, theta=None):
    """Head by head and token by token."""
    heads, nope = layer.num_heads, SIZES["qk_nope_head_dim"]
    rows = []
    for t, token in enumerate(x):
        kept = layer.kv_a_proj.weight @ token
        latent, shared = kept[: layer.latent], kept[layer.latent :]
        latent = latent * torch.rsqrt(latent.square().mean() + 1e-6) * layer.kv_norm.weight
        both = (layer.kv_b_proj.weight @ latent).view(heads, -1)
        q = (layer.q_proj.weight @ token).view(heads, -1)
        if theta is not None:
            shared = turned(shared, t, theta)
            q = torch.stack([torch.cat([h[:nope], turned(h[nope:], t, theta)]) for h in q])
        k = torch.cat([both[:, :nope], shared.expand(heads, -1)], 1)
        rows.append((q, k, both[:, nope:]))
    outputs = []
    for t, (q, _, _) in enumerate(rows):
        scores = torch.stack([(q * k).sum(1) for _, k, _ in rows[: t + 1]], 1) * layer.scale
        o = sum(w[:, None] * v for w, (_, _, v) in zip(scores.softmax(1).T, rows, strict=False))
        outputs.append(layer.o_proj.weight @ o.flatten())
    return torch.stack(outputs)


@pytest.mark.parametrize("theta", [None, 100.0])
def test_both_forms_are_the_definition(theta, monkeypatch):
    layer, x = make(rope_theta=theta), torch.randn(1, 30, 16, dtype=torch.float64)
    expected = definition(layer, x[0], theta)
    whole, _ = layer(x)
    # Few tokens at a time go through the maps of the latent vector.
    parts, state = [], None
    for part in x.split([1, 3, 1, 25], 1):
        y, state = layer(part, state)
        parts.append(y)
    assert relative_rms(whole[0], expected) < 1e-12
    assert relative_rms(torch.cat(parts, 1)[0], expected) < 1e-12
    monkeypatch.setattr("deltarule.nn.latent_attention.is_plain", lambda module: False)
    assert relative_rms(layer(x[:, :2])[0][0], expected[:2]) < 1e-12


def test_the_state_is_one_small_vector_a_token():
    state = make()(torch.randn(2, 7, 16, dtype=torch.float64))[1]
    assert state["keys"].shape == (2, 7, 1, 12)
    assert state["values"].numel() == 0


def test_written_out_weights_are_those_of_the_output():
    layer, x = make(), torch.randn(1, 9, 16, dtype=torch.float64)
    weights = layer.weights(x)
    values = layer.expanded(layer._project(x, torch.arange(9)[None])[1])[1]
    o = torch.einsum("bhij, bjhd -> bihd", weights, values).flatten(-2)
    assert relative_rms(layer.o_proj(o), layer(x)[0]) < 1e-12


def test_a_model_reads_in_every_way():
    torch.manual_seed(0)
    stream = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 2}
    mixers = {"layer_types": ("kda", "attention"), "kv_lora_rank": 8}
    model = CausalLM(ModelConfig(**stream, **mixers, **HEAD))
    with torch.no_grad():
        check_ways_of_reading(model, torch.randint(61, (2, 40)))
