"""The feed-forward half: its fused form under Triton's interpreter, against plain float64."""

import pytest
import torch

from deltarule.nn import mlp
from promised import promised
from tolerance import assert_close, relative_rms

promised("triton")

from deltarule.ops.fused.swiglu import SwiGLULinear, swiglu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here: see test_neighbours_on_gpu"
)


def built(dtype):
    gate, up = (2 * torch.randn(2, 2, 37, 24)).to(dtype).unbind()
    down = torch.nn.Linear(24, 10, bias=False, dtype=dtype)
    return gate.requires_grad_(), up.requires_grad_(), down


def exact(gate, up, down, weight):
    leaves = [x.detach().double().requires_grad_() for x in (gate, up, down.weight)]
    y = (torch.nn.functional.silu(leaves[0]) * leaves[1]) @ leaves[2].mT
    return y, torch.autograd.grad(y, leaves, weight.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_product_after_it(dtype):
    gate, up, down = built(dtype)
    y = mlp.gated_product(gate, up, down)
    assert "SwiGLULinear" in type(y.grad_fn).__name__
    weight = torch.randn_like(y)
    expected, gradients = exact(gate, up, down, weight)
    found = torch.autograd.grad(y, (gate, up, down.weight), weight)
    if dtype == torch.float32:
        assert_close(y, expected, dtype=dtype)
        for x, g in zip(found, gradients, strict=True):
            assert_close(x, g, dtype=dtype, gradient=True)
    else:
        assert relative_rms(y, expected) < 2**-10
        assert all(relative_rms(x, g) < 2**-9 for x, g in zip(found, gradients, strict=True))


def test_it_keeps_gate_up_and_the_weight_alone():
    gate, up, down = built(torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        mlp.gated_product(gate, up, down)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in (gate, up, down.weight)}


def test_a_backward_leaves_what_was_kept_and_the_given_gradient_as_they_were():
    gate, up, down = built(torch.float32)
    y = mlp.gated_product(gate, up, down)
    weight = torch.randn_like(y)
    before = [x.detach().clone() for x in (gate, up, down.weight, weight)]
    first = torch.autograd.grad(y, (gate, up, down.weight), weight, retain_graph=True)
    again = torch.autograd.grad(y, (gate, up, down.weight), weight)
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, before, (gate, up, down.weight, weight)))


def test_frozen_weights_need_no_product():
    gate, up, down = built(torch.float32)
    down.weight.requires_grad_(False)
    y = mlp.gated_product(gate, up, down)
    weight = torch.randn_like(y)
    _, gradients = exact(gate, up, down, weight)
    for x, g in zip(torch.autograd.grad(y, (gate, up), weight), gradients[:2], strict=True):
        assert_close(x, g, dtype=torch.float32, gradient=True)


def test_a_hook_on_the_product_is_called():
    gate, up, down = built(torch.float32)
    called = []
    down.register_forward_hook(lambda *_: called.append(1))
    y = mlp.gated_product(gate, up, down)
    assert called == [1]
    assert_close(y, exact(gate, up, down, torch.randn_like(y))[0], dtype=torch.float32)


@pytest.mark.parametrize("gate", [-80.0, 80.0, 1e4])
def test_large_gates_give_no_nan(gate):
    gates = torch.full((1, 3), gate, requires_grad=True)
    up = torch.ones(1, 3, requires_grad=True)
    h = swiglu(gates, up)
    h.sum().backward()
    assert h.isfinite().all()
    assert gates.grad.isfinite().all()


def test_the_class_is_that_of_the_operator():
    gate, up, down = built(torch.float32)
    y = SwiGLULinear.apply(gate, up, down.weight)
    assert_close(y, down(swiglu(gate, up)).double(), dtype=torch.float32)
