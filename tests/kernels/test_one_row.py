"""Products of one row: those of float64, whatever the sizes."""

import pytest
import torch
import torch.nn.functional as F

from deltarule.nn import few_rows
from tolerance import relative_rms


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("outputs", "inputs"), [(5, 7), (37, 1100), (1035, 33), (9, 5472)])
def test_products_are_those_of_float64(outputs, inputs, device):
    from deltarule.ops.fused.one_row_triton import one_row

    x, weight = torch.randn(inputs, device=device), torch.randn(outputs, inputs, device=device)
    assert relative_rms(one_row(x, weight), weight.double() @ x.double()) < 1e-6
    rounded = one_row(x.bfloat16(), weight.bfloat16())
    # The interpreter rounds towards zero.
    exact = weight.bfloat16().double() @ x.bfloat16().double()
    assert relative_rms(rounded, exact) < 2**-7


def test_what_stands_before_a_product_is_made_within_it(device):
    from deltarule.ops.fused.one_row_triton import normed_row, one_row

    def drawn(*sizes):
        return torch.randn(*sizes, device=device)

    def norm(x, scale, eps=1e-3):
        x = x.double()
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * scale.double()

    gate, up = drawn(2, 1100)
    weight, residual = drawn(21, 1100), drawn(21)
    expected = weight.double() @ (F.silu(gate.double()) * up.double()) + residual.double()
    assert relative_rms(one_row(gate, weight, up, residual), expected) < 1e-6
    x, opened = drawn(3, 60)[..., :20], drawn(3, 40)[..., 20:]
    weight, scale = drawn(21, 60), drawn(20)
    for act, gated in (("silu", F.silu), ("sigmoid", torch.sigmoid), ("none", None)):
        factor = 1 if gated is None else gated(opened.double())
        expected = weight.double() @ (norm(x, scale) * factor).flatten() + residual.double()
        given = None if gated is None else opened
        found = normed_row(x, scale, 1e-3, weight, given, act, residual)
        assert relative_rms(found, expected) < 1e-6


@pytest.mark.gpu
def test_one_row_on_a_gpu_takes_the_kernel():
    x, weight = torch.randn(1, 1, 64, device="cuda"), torch.randn(48, 64, device="cuda")
    with torch.no_grad():
        y = few_rows.product(x, weight)
    assert y.shape == (1, 1, 48)
    assert relative_rms(y, x.double() @ weight.double().mT) < 1e-6
