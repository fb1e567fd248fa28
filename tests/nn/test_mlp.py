"""The feed-forward half: its fused form under Triton's interpreter, against plain float64."""

import pytest
import torch

from deltarule.nn import mlp
from deltarule.ops.operators import direct
from promised import promised
from tolerance import assert_close, relative_rms

promised("triton")

from deltarule.ops.fused.swiglu import swiglu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here: see test_neighbours_on_gpu"
)


def built(dtype):
    """x, and weights of gate, up and down."""
    shapes = (2, 37, 12), (24, 12), (24, 12), (10, 24)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def fused(x, gate, up, down, factor=1.0):
    return direct(mlp.GatedProducts)(x, gate, up, down, factor)


def exact(x, gate, up, down, factor=1.0):
    return (torch.nn.functional.silu(factor * (x @ gate.mT)) * (x @ up.mT)) @ down.mT


def gradients_of(run, given, d_y, *factor):
    y = run(*given, *factor)
    return y, torch.autograd.grad(y, given, d_y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 0.5])
# Weights that share a product, and those with one each.
@pytest.mark.parametrize("small", [0, 2**21])
def test_all_three_products(dtype, factor, small, monkeypatch):
    monkeypatch.setattr("deltarule.nn.linears.SMALL", small)
    given = built(dtype)
    d_y = torch.randn(2, 37, 10).to(dtype)
    y, found = gradients_of(fused, given, d_y, factor)
    wide = [x.detach().double().requires_grad_() for x in given]
    expected, gradients = gradients_of(exact, wide, d_y.double(), factor)
    if dtype == torch.float32:
        assert_close(y, expected, dtype=dtype)
        for x, g in zip(found, gradients, strict=True):
            assert_close(x, g, dtype=dtype, gradient=True)
    else:
        assert relative_rms(y, expected) < 2**-9
        assert all(relative_rms(x, g) < 2**-8 for x, g in zip(found, gradients, strict=True))


def test_outputs_that_are_no_multiple_of_eight():
    x, *others = built(torch.float32)
    odd = [x, others[0][:13], others[1][:13], others[2][:, :13]]
    odd = [given.detach().contiguous().requires_grad_() for given in odd]
    d_y = torch.randn(2, 37, 10)
    _, found = gradients_of(fused, odd, d_y)
    wide = [given.detach().double().requires_grad_() for given in odd]
    for x, g in zip(found, gradients_of(exact, wide, d_y.double())[1], strict=True):
        assert_close(x, g, dtype=torch.float32, gradient=True)


def test_it_keeps_no_product_of_gate_and_up():
    given = built(torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        fused(*given)
    # x, the weights down and, in one, gate and up; and what both give.
    shapes = [(2, 37, 12), (10, 24), (74, 24), (74, 24), (48, 12)]
    assert [tuple(x.shape) for x in kept] == shapes


def test_a_backward_leaves_what_was_kept_and_the_given_gradient_as_they_were():
    given = built(torch.float32)
    y, d_y = fused(*given), torch.randn(2, 37, 10)
    before = [x.detach().clone() for x in (*given, d_y)]
    first = torch.autograd.grad(y, given, d_y, retain_graph=True)
    again = torch.autograd.grad(y, given, d_y)
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, before, (*given, d_y)))


@pytest.mark.parametrize("frozen", range(4))
def test_what_is_frozen_has_no_gradient(frozen):
    given = built(torch.float32)
    d_y = torch.randn(2, 37, 10)
    _, expected = gradients_of(fused, given, d_y)
    given[frozen].requires_grad_(False)
    fused(*given).backward(d_y)
    assert given[frozen].grad is None
    for i, x in enumerate(given):
        assert i == frozen or torch.equal(x.grad, expected[i])


@pytest.fixture
def layer(monkeypatch):
    """A layer that takes kernels here."""
    monkeypatch.setattr(mlp, "why_not_fused", lambda x: None)
    return mlp.SwiGLU(12, 24, gate_multiplier=0.5)


def test_a_layer_of_plain_products_is_one_node(layer):
    x = torch.randn(2, 5, 12, requires_grad=True)
    y = layer(x)
    assert "GatedProducts" in type(y.grad_fn).__name__
    expected = exact(x, *(p for p in layer.parameters()), 0.5)
    assert_close(y, expected.double(), dtype=torch.float32)
    with torch.no_grad():
        assert_close(layer(x), expected.double(), dtype=torch.float32)


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_a_hook_on_any_product_is_called(layer, name):
    called = []
    getattr(layer, name).register_forward_hook(lambda *_: called.append(1))
    x = torch.randn(2, 5, 12, requires_grad=True)
    y = layer(x)
    assert called == [1]
    expected = exact(x, *(p for p in layer.parameters()), 0.5)
    assert_close(y, expected.double(), dtype=torch.float32)


def test_a_weight_that_is_more_than_a_tensor_is_multiplied_by_its_module(layer):
    torch.nn.utils.parametrizations.weight_norm(layer.up_proj)
    x = torch.randn(2, 5, 12, requires_grad=True)
    y = layer(x)
    assert "GatedProducts" not in type(y.grad_fn).__name__
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("gate", [-80.0, 80.0, 1e4])
def test_large_gates_give_no_nan(gate):
    gates = torch.full((1, 3), gate, requires_grad=True)
    up = torch.ones(1, 3, requires_grad=True)
    h = swiglu(gates, up)
    h.sum().backward()
    assert h.isfinite().all()
    assert gates.grad.isfinite().all()
