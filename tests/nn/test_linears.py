"""Projections of one input at once: the same numbers as one by one."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from deltarule.nn.linears import (
    adjoin,
    as_one,
    by_weights,
    in_one_product,
    is_plain,
    linear,
    linears,
    together,
)

SIZES = (5, 1, 7)


def built(dtype=torch.float64):
    x = torch.randn(2, 4, 6, dtype=dtype, requires_grad=True)
    return x, [nn.Linear(6, size, bias=False, dtype=dtype) for size in SIZES]


def gradients(outputs, weights, x, modules):
    leaves = [x, *(module.weight for module in modules)]
    return torch.autograd.grad(outputs, leaves, weights, allow_unused=True)


@pytest.mark.parametrize("small", [0, 30, 2**21])
@pytest.mark.parametrize("read", [(0, 1, 2), (2,)])
def test_outputs_and_gradients(read, small, monkeypatch):
    monkeypatch.setattr("deltarule.nn.linears.SMALL", small)
    x, modules = built()
    ours, plain = by_weights(x, modules, together), [module(x) for module in modules]
    for y, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    weights = [torch.randn_like(plain[i]) for i in read]
    found = gradients([ours[i] for i in read], weights, x, modules)
    exact = gradients([plain[i] for i in read], weights, x, modules)
    for a, b in zip(found, exact, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def operators(x, modules):
    """Names of what PyTorch runs in a forward and a backward pass."""
    with torch.profiler.profile(acc_events=True) as profile:
        sum(y.sum() for y in by_weights(x, modules, together)).backward()
    return [event.name for event in profile.events()]


def test_one_product_for_the_input_s_gradient_and_no_sum(monkeypatch):
    monkeypatch.setattr("deltarule.nn.linears.SMALL", 0)
    x, modules = built()
    names = operators(x, modules)
    assert names.count("aten::addmm_") == len(SIZES) - 1


def test_small_weights_are_one_product():
    x, modules = built()
    names = operators(x, modules)
    # One forward, one by the input, one by the weights, whose outputs are filled up to 24.
    assert names.count("aten::mm") == 3
    assert names.count("aten::addmm_") == 0
    # A launch past Triton's search asks for it.
    assert all(y.data_ptr() % 16 == 0 for y in by_weights(x, modules, together))


def test_a_module_that_is_more_than_a_product_is_called():
    x, modules = built()
    called = []
    modules[1].register_forward_hook(lambda *_: called.append(1))
    biased, chain = nn.Linear(6, 3, dtype=torch.float64), nn.Sequential(modules[0])
    assert [is_plain(m) for m in (*modules, biased, chain)] == [True, False, True, False, False]
    ours = by_weights(x, [*modules, biased, chain], together)
    assert called == [1]
    for y, module in zip(ours, (*modules, biased, chain), strict=True):
        torch.testing.assert_close(y, module(x))


@pytest.mark.parametrize(
    "apply", [linears, *(partial(by_weights, products=f) for f in (together, in_one_product))]
)
def test_a_forward_that_was_put_in_place_of_the_own_is_called(apply):
    # As accelerate and some adapters do it.
    x, modules = built()
    own = modules[1].forward
    modules[1].forward = lambda x: own(x) + 1
    for y, module in zip(apply(x, modules), modules, strict=True):
        torch.testing.assert_close(y, module(x))
    torch.testing.assert_close(linear(x, modules[1]), modules[1](x))


def test_frozen_weights_and_inputs_get_no_gradient():
    x, modules = built()
    modules[0].weight.requires_grad_(False)
    sum(y.sum() for y in by_weights(x.detach(), modules, together)).backward()
    assert x.grad is None
    assert modules[0].weight.grad is None
    assert modules[1].weight.grad is not None


def test_autocast_gives_its_dtype_and_float32_gradients():
    x, modules = built(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, plain = by_weights(x, modules, together), [module(x) for module in modules]
    for y, expected in zip(ours, plain, strict=True):
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y, expected)
    sum(y.float().sum() for y in ours).backward()
    assert x.grad.dtype == modules[0].weight.grad.dtype == torch.float32


def test_a_cpu_calls_the_modules():
    x, modules = built()
    assert all(
        "MmBackward" in str(y.grad_fn) or "Unsafe" in str(y.grad_fn) for y in linears(x, modules)
    )


def test_weights_laid_end_to_end_are_one_product_with_the_same_parameters():
    torch.manual_seed(0)
    modules = [nn.Linear(6, size, bias=False) for size in (4, 2, 8)]
    modules.insert(1, nn.Sequential(nn.Linear(6, 3)))
    x, before = torch.randn(2, 3, 6), [copy.deepcopy(m) for m in modules]
    parameters = [id(p) for m in modules for p in m.parameters()]
    adjoin(modules)
    plain = [m.weight for m in modules if isinstance(m, nn.Linear)]
    assert as_one(plain) is not None
    assert as_one(plain[1:]) is not None
    assert as_one(plain[::2]) is None
    assert parameters == [id(p) for m in modules for p in m.parameters()]
    with torch.no_grad():
        for y, module in zip(by_weights(x, modules, in_one_product), before, strict=True):
            torch.testing.assert_close(y, module(x))
        # Training goes on with the same weights.
        plain[0].add_(1)
        moved = before[0](x) + x.sum(-1, keepdim=True)
        torch.testing.assert_close(by_weights(x, modules, in_one_product)[0], moved)
    modules[0](x).sum().backward()
    assert plain[0].grad is not None
    assert plain[1].grad is None
