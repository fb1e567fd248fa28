"""The Triton kernel of `mesa` without a GPU: under the interpreter, against float64."""

import pytest
import torch
import torch.nn.functional as F

from deltarule.ops.mesa.torch import Covariance, conjugate_gradients, solution
from promised import promised
from tolerance import relative_rms

promised("triton")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here: see tests/ops/test_mesa.py"
)


def systems(chunks=2, heads=2, size=20, channels=6, rows=1):
    """Covariances as the chunks of a call have them, and right sides."""
    k = F.normalize(torch.randn(chunks, rows, heads, size, channels), dim=-1)
    spread = torch.randn(chunks, rows, heads, channels, channels) / channels**0.5
    weights = torch.rand(chunks, rows, heads, size, size).tril()
    start = torch.rand(chunks, rows, heads, size, 1)
    ridge = 0.25 + torch.rand(heads, 1, channels)
    return Covariance(k, weights, start, spread @ spread.mT, ridge), torch.randn_like(k)


def double(covariance):
    return Covariance(*(x.double() for x in covariance))


@pytest.mark.parametrize("sizes", [(1, 3), (20, 6), (64, 16), (33, 40)])
@pytest.mark.parametrize("iterations", [1, 7])
def test_iterations_are_those_of_pytorch(sizes, iterations):
    """The definition's own sequence, not only its limit."""
    covariance, b = systems(size=sizes[0], channels=sizes[1])
    found = solution(b, *covariance, None, iterations, "triton")
    expected = conjugate_gradients(double(covariance), b.double(), iterations)
    own = relative_rms(conjugate_gradients(covariance, b, iterations), expected)
    assert relative_rms(found, expected) <= max(4 * own, 1e-6)


def test_what_is_zero_stays_zero():
    """A masked token has no right side, and one that has converged moves no more."""
    covariance, b = systems()
    b[:, :, :, 3:5] = 0
    found = solution(b, *covariance, None, 30, "triton")
    assert (found[:, :, :, 3:5] == 0).all()
    assert found.isfinite().all()
