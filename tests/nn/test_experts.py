"""Experts beside a loop over tokens in float64: every way to choose, and every dtype."""

import re

import pytest
import torch

from deltarule.nn import Experts
from tolerance import relative_rms

SIZES = {"num_experts": 8, "num_experts_per_tok": 3}
WAYS = {
    "softmax": {},
    "softmax, not divided": {"norm_topk_prob": False, "routed_scaling_factor": 1.5},
    "sigmoid in groups": {"scoring_func": "sigmoid", "n_group": 4, "topk_group": 2},
    "shared": {"shared_size": 24, "shared_gate": True},
    "relu2": {"activation": "relu2", "shared_size": 24},
}


# What is refused as in `ModelConfig`, whose tests have the others.
WRONG = {
    "scoring_func must be one of softmax, sigmoid, got 'sigmod': did you mean 'sigmoid'?":
        {"scoring_func": "sigmod"},
    "activation must be one of silu, relu2, got 'gelu'": {"activation": "gelu"},
    "num_experts_per_tok must be at most 8": {"num_experts_per_tok": 9},
    "num_experts must be an integer of 1 or more, got 0": {"num_experts": 0},
    "n_group must divide num_experts=8, got 3": {"n_group": 3},
    "topk_group must be an integer of 1 or more, got 0": {"topk_group": 0},
    "routed_scaling_factor must be a finite number above 0": {"routed_scaling_factor": 0},
    "norm_topk_prob must be True or False, got 'no'": {"norm_topk_prob": "no"},
    "shared_size must be an integer of 0 or more, got -1": {"shared_size": -1},
    "shared_gate must be False without a shared_size, got True": {"shared_gate": True},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_are_named(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**WRONG[message])
    with pytest.raises(ValueError, match="mlp_size must be an integer of 1 or more, got 0"):
        Experts(16, 0, **SIZES)


def make(**options):
    torch.manual_seed(0)
    layer = Experts(16, 8, **SIZES | options).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    if layer.e_score_correction_bias is not None:
        layer.e_score_correction_bias.normal_(std=0.3)
    return layer


def network(x, up, down, activation):
    inner = up @ x
    if activation == "silu":
        gate, inner = inner.chunk(2)
        return down @ (torch.sigmoid(gate) * gate * inner)
    return down @ inner.clamp(min=0).square()


def definition(layer, x):
    """Token by token, choice by choice."""
    rows = []
    for token in x.flatten(0, -2):
        logits = layer.router.weight @ token
        exp = logits.exp()
        scores = exp / exp.sum() if layer.scoring_func == "softmax" else 1 / (1 + (-logits).exp())
        bias = layer.e_score_correction_bias
        choice = (scores if bias is None else scores + bias).tolist()
        size = len(choice) // layer.n_group
        groups = [sorted(choice[i : i + size])[-2:] for i in range(0, len(choice), size)]
        best = sorted(range(layer.n_group), key=lambda i: -sum(groups[i]))[: layer.topk_group]
        allowed = [i for i in range(len(choice)) if i // size in best]
        chosen = sorted(allowed, key=lambda i: -choice[i])[: layer.num_experts_per_tok]
        total = sum(scores[i] for i in chosen) if layer.norm_topk_prob else 1
        y = sum(
            scores[i]
            / total
            * layer.routed_scaling_factor
            * network(token, layer.up_proj[i], layer.down_proj[i], layer.activation)
            for i in chosen
        )
        if layer.shared is not None:
            shared = layer.shared(token)
            if layer.shared_gate is not None:
                shared = shared * torch.sigmoid(layer.shared_gate(token))
            y = y + shared
        rows.append(y)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_choose_is_its_definition(way):
    layer, x = make(**WAYS[way]), torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    expected = definition(layer, x)
    exact = torch.autograd.grad(expected.square().sum(), [x, layer.up_proj])
    assert relative_rms(layer(x), expected) < 1e-12
    layer, x = layer.float(), x.detach().float().requires_grad_()
    assert relative_rms(layer(x), expected) < 1e-6
    found = torch.autograd.grad(layer(x).square().sum(), [x, layer.up_proj])
    assert all(relative_rms(a, b) < 5e-6 for a, b in zip(found, exact, strict=True))


def test_half_precision_and_autocast():
    layer, x = make(shared_size=24), torch.randn(2, 7, 16, dtype=torch.float64)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = layer.float()(x.float())
    assert autocast.dtype == torch.float32
    half = layer.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    for found in (autocast, half):
        # A rounded router may choose another expert; here it does not.
        assert relative_rms(found.double(), expected) < 0.02


def test_a_router_that_is_more_than_a_product_is_called():
    """As one with an adapter (LoRA), or in 8 bits."""
    layer, x = make(), torch.randn(2, 7, 16, dtype=torch.float64)
    expected, plain = layer(x), layer.router
    layer.router = torch.nn.Sequential(plain)
    assert torch.equal(layer(x), expected)


def test_a_hook_on_the_router_sees_it_and_moves_no_choice():
    layer, x = make().bfloat16(), torch.randn(2, 200, 16, dtype=torch.bfloat16)
    expected, seen = layer(x), []
    layer.router.register_forward_hook(lambda module, given, logits: seen.append(logits.dtype))
    assert torch.equal(layer(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        layer.float()(x.float())
    assert seen == [torch.float32] * 2


def test_rows_of_odd_sizes_and_no_rows():
    layer = Experts(5, 3, num_experts=4, num_experts_per_tok=4)
    assert layer(torch.randn(1, 3, 5)).shape == (1, 3, 5)
    assert layer(torch.zeros(1, 0, 5)).shape == (1, 0, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_compile_in_every_precision(dtype):
    """To the compiler PyTorch's grouped product has bfloat16 alone."""
    torch.compiler.reset()
    layer, x = make().to(dtype), torch.randn(2, 7, 16, dtype=dtype)
    compiled = torch.compile(layer, backend="eager", fullgraph=dtype == torch.bfloat16)
    torch.testing.assert_close(compiled(x), layer(x))
