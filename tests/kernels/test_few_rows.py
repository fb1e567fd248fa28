"""Products of a few rows: those of float64, whatever the sizes."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F

from deltarule.nn import linears
from tolerance import relative_rms

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 7), (37, 1100), (4099, 33)])
def test_products_are_those_of_float64(rows, outputs, inputs, device):
    from deltarule.ops.fused.few_rows_triton import few_rows

    apart = torch.randn(rows, 2 * inputs, device=device)
    x, weight = apart[:, :inputs], torch.randn(outputs, inputs, device=device)
    expected = x.double() @ weight.double().mT
    assert relative_rms(few_rows(x, weight), expected) < 1e-6
    rounded = few_rows(x.bfloat16(), weight.bfloat16())
    exact = x.bfloat16().double() @ weight.bfloat16().double().mT
    # The interpreter rounds towards zero.
    assert relative_rms(rounded, exact) < 2**-7


@pytest.mark.parametrize("rows", [1, 2])
def test_what_stands_before_a_product_is_made_within_it(rows, device):
    from deltarule.ops.fused.few_rows_triton import few_rows, normed_rows

    def drawn(*sizes):
        return torch.randn(*sizes, device=device)

    def norm(x, scale, eps=1e-3):
        x = x.double()
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * scale.double()

    gate, up = drawn(rows, 2, 1100).unbind(1)
    weight, residual = drawn(21, 1100), drawn(rows, 21)
    expected = F.silu(gate.double()) * up.double() @ weight.double().mT + residual.double()
    assert relative_rms(few_rows(gate, weight, up, residual), expected) < 1e-6
    x, opened = drawn(rows, 3, 60)[..., :20], drawn(rows, 3, 40)[..., 20:]
    weight, scale = drawn(21, 60), drawn(20)
    for act, gated in (("silu", F.silu), ("sigmoid", torch.sigmoid), ("none", None)):
        factor = 1 if gated is None else gated(opened.double())
        expected = (norm(x, scale) * factor).flatten(1) @ weight.double().mT + residual.double()
        given = None if gated is None else opened
        found = normed_rows(x, scale, 1e-3, weight, given, act, residual)
        assert relative_rms(found, expected) < 1e-6


@pytest.mark.gpu
def test_few_rows_on_a_gpu_take_the_kernel():
    x, weight = torch.randn(2, 1, 64, device="cuda"), torch.randn(48, 64, device="cuda")
    y = linears.product(x, weight)
    assert y.shape == (2, 1, 48)
    assert relative_rms(y, x.double() @ weight.double().mT) < 1e-6
