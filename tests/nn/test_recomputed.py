"""What the backward computes again: the same gradients, from fewer saved tensors."""

import copy

import pytest
import torch
from torch import nn

from deltarule.models import block
from deltarule.nn import delta_mixer as mixers
from deltarule.nn import recomputed as recomputed_file
from deltarule.nn.recomputed import hooks_are_free, recomputed, remembered
from small import small_model


def build():
    return torch.randn(3, 5, 4, requires_grad=True), [nn.Linear(4, 2) for _ in range(3)]


def test_each_backward_computes_once():
    x, modules = build()
    leaves = [x, *(module.weight for module in modules)]
    calls = []
    y = x.tanh()
    with remembered((y, lambda: calls.append(torch.is_grad_enabled()) or x.tanh())):
        total = sum(module(y).square().sum() for module in modules)
    kept = x.tanh()
    plain = torch.autograd.grad(sum(module(kept).square().sum() for module in modules), leaves)
    for run in (1, 2):
        found = torch.autograd.grad(total, leaves, retain_graph=True)
        assert all(map(torch.equal, found, plain))
        assert calls == [False] * run


def test_a_tensor_is_dropped_as_soon_as_all_have_read_it():
    x, modules = build()
    y = x.exp()
    recipes = []
    with remembered((y, lambda: x.exp())):
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        recipes += top[0].recipes.values()
        total = sum(module(y).square().sum() for module in modules)
    (recipe,) = recipes
    assert recipe.x is None
    assert recipe.readers == 3
    total.backward()
    assert recipe.x is None


def test_others_hooks_are_left_alone():
    x, _ = build()
    assert hooks_are_free()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not hooks_are_free()
        with recomputed((x, lambda: x)):
            assert not hooks_are_free()
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        assert not hooks_are_free()
    with remembered((x, lambda: x)):
        assert hooks_are_free()


def test_a_cpu_keeps_its_tensors():
    x, _ = build()
    with recomputed((x, lambda: x)):
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_gpu_keeps_what_is_small(monkeypatch):
    x, _ = build()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for least, noted in ((x.nbytes, True), (x.nbytes + 1, False)):
        monkeypatch.setattr(recomputed_file, "LEAST", least)
        with recomputed((x, lambda: x)):
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        assert (top is not None) == noted


@pytest.mark.parametrize(
    "layer", ["deltanet", "gated_deltanet", "kda", "mamba2", "attention", "rwkv7"]
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_has_the_same_gradients_bitwise(layer, checkpointing, monkeypatch):
    model = small_model(layer, layer, hidden_size=32, num_heads=2)
    tokens = torch.randint(257, (2, 30))
    again = copy.deepcopy(model)
    again.activation_checkpointing = checkpointing
    model.hidden(tokens)[0].square().sum().backward()
    used = []

    def note(*tensors):
        used.append(1)
        noted = [(x, lambda f=compute: used.append(2) or f()) for x, compute in tensors]
        return remembered(*noted)

    if not checkpointing:
        monkeypatch.setattr(mixers, "recomputed", note)
        monkeypatch.setattr(block, "recomputed", note)
    again.hidden(tokens)[0].square().sum().backward()
    assert (2 in used) == (not checkpointing)
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


def test_the_forward_s_autocast_holds_for_what_is_computed_again():
    x, _ = build()
    weight = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ weight
        with remembered((y, lambda: x @ weight)):
            z = y @ weight
    z.float().sum().backward()
    assert weight.grad is not None
