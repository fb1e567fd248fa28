"""Every norm and MLP that the patch replaces, against the forward of its class in transformers."""

from functools import cache

import pytest
import torch
from torch import nn

from deltarule.hf import patch
from deltarule.hf.norms import NORMS
from deltarule.nn import mlp
from deltarule.nn import norm as own
from hf.families import FAMILIES, error, logits, tiny, tokens
from promised import promised

NAMES = [name for name in sorted(NORMS) if "lara_mini" in FAMILIES or "LaraMini" not in name]


@cache
def modules_of(family: str) -> dict[str, nn.Module]:
    """One module of each replaced class in a tiny model."""
    return {name: x for x in tiny(family).modules() if (name := type(x).__name__) in NORMS}


@cache
def module_of(name: str) -> nn.Module:
    """The first one; multipliers, if it has any, are not one."""
    module = next(found[name] for found in map(modules_of, FAMILIES) if name in found)
    if hasattr(module, "gate_multiplier"):
        module.gate_multiplier, module.down_multiplier = 0.7, 1.3
    return module


KINDS = [
    "plain float32", "plain bfloat16", "interpreted float32",
    pytest.param("compiled float32", marks=pytest.mark.gpu),
    pytest.param("compiled bfloat16", marks=pytest.mark.gpu),
]  # fmt: skip


FLOATS = torch.float32, torch.bfloat16


# Triton's interpreter cuts bfloat16 where a GPU rounds.
@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    """Whether kernels run, and a type of numbers."""
    side, dtype = request.param.split()
    if side == "interpreted":
        promised("triton")
        if torch.cuda.is_available():
            pytest.skip("kernels are compiled here")
        for place in (own, mlp):
            monkeypatch.setattr(place, "why_not_fused", lambda _: None)
    return {"device": "cuda" if side == "compiled" else "cpu", "dtype": getattr(torch, dtype)}


def inputs_of(module: nn.Module, **kind: object) -> list[torch.Tensor]:
    """x, and a gate where the class takes one: parts of something wider, of several heads."""
    size = next(module.parameters()).shape[-1]
    heads = () if hasattr(module, "group_size") else (3,)
    count = 2 if "Gated" in type(module).__name__ else 1
    wide = torch.randn(count, 4, 50, *heads, size + 3)
    return [x[..., 2:-1].to(**kind).requires_grad_() for x in wide]


def run(forward, module, inputs, d_y):
    """The output and the gradients by inputs and parameters; and the output's dtype."""
    y = forward(module, *inputs)
    found = torch.autograd.grad(y, [*inputs, *module.parameters()], d_y.to(y.dtype))
    return [y.detach(), *found], y.dtype


@pytest.mark.parametrize("name", NAMES)
def test_forward_and_gradients(name, kind):
    """In bfloat16 no further from what float32 gives than transformers' own."""
    module = module_of(name).to(**kind)
    theirs, inputs = type(module).forward, inputs_of(module, **kind)
    d_y = torch.randn_like(theirs(module, *inputs))
    expected, dtype = run(theirs, module, inputs, d_y)
    found, ours = run(NORMS[name], module, inputs, d_y)
    assert ours == dtype
    inputs = [x.detach().float().requires_grad_() for x in inputs]
    exact, _ = run(theirs, module.float(), inputs, d_y)
    for a, b, c in zip(found, expected, exact, strict=True):
        assert error(a, c) <= max(1.02 * error(b, c), 1e-6)


@pytest.mark.parametrize("name", [name for name in NAMES if "Norm" in name])
@pytest.mark.parametrize("dtypes", [FLOATS, FLOATS[::-1]])
def test_weights_of_another_type(name, dtypes):
    module = module_of(name).to(dtypes[0])
    x = inputs_of(module, dtype=dtypes[1])
    theirs, ours = type(module).forward(module, *x), NORMS[name](module, *x)
    assert ours.dtype == theirs.dtype
    assert error(ours, theirs) < 2**-7


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "mamba2", "olmo_hybrid"])
def test_autocast(name):
    """Weights in float32, products in bfloat16."""
    model, ids = tiny(name, **DENSE.get(name, {})), tokens(2, 30)
    exact = logits(model, ids)
    with torch.autocast("cpu", torch.bfloat16), patch(model, norms=False):
        theirs = logits(model, ids)
    with torch.autocast("cpu", torch.bfloat16), patch(model):
        ours = logits(model, ids)
    assert ours.dtype == theirs.dtype
    assert error(ours, exact) < 1.1 * error(theirs, exact)


# Rounding sends tokens to other experts.
DENSE = {"kimi_linear": {"mlp_layer_types": ["dense"] * 4}}


def test_another_activation_is_kept():
    model, ids = tiny("qwen3_5", hidden_act="gelu"), tokens(1, 20)
    before = logits(model, ids)
    with patch(model):
        assert error(logits(model, ids), before) < 1e-5


def test_hooks_on_the_projections_are_called():
    model, seen = tiny("qwen3_5"), []
    for key, module in model.named_modules():
        if key.endswith(("gate_proj", "up_proj", "down_proj")):
            module.register_forward_hook(lambda *_: seen.append(1))
    with patch(model):
        logits(model, tokens(1, 5))
    assert len(seen) == 12
