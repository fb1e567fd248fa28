"""The Triton kernel of `mesa` without a GPU: under the interpreter, against float64."""

import pytest
import torch
import torch.nn.functional as F

from deltarule import MesaState, pack
from deltarule.ops.mesa import definition as reference
from deltarule.ops.mesa import torch as chunked
from deltarule.ops.mesa.torch import Covariance, conjugate_gradients, iterations_operator
from ops import test_mesa as operator
from promised import promised
from tolerance import assert_close, relative_rms

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
    found = iterations_operator(*covariance, b, iterations)
    expected = conjugate_gradients(double(covariance), b.double(), iterations)
    own = relative_rms(conjugate_gradients(covariance, b, iterations), expected)
    assert relative_rms(found, expected) <= max(4 * own, 1e-6)


def test_what_is_zero_stays_zero():
    """A masked token has no right side, and one that has converged moves no more."""
    covariance, b = systems()
    b[:, :, :, 3:5] = 0
    found = iterations_operator(*covariance, b, 30)
    assert (found[:, :, :, 3:5] == 0).all()
    assert found.isfinite().all()


def run(x, backend, cu_seqlens=None):
    leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
    state = MesaState(leaves["covariance"], leaves["values"])
    named = {name: leaves[name] for name in ("beta", "regularizer", "log_decay")}
    form = {"iterations": None} if backend is None else {"iterations": 18, "backend": backend}
    call = reference.mesa if backend is None else chunked.mesa
    out = call(
        leaves["q"], leaves["k"], leaves["v"], **named, scale=0.4, initial_state=state,
        cu_seqlens=cu_seqlens, **form,
    )  # fmt: skip
    loss = out.o.square().sum() + sum(part.square().sum() for part in out.final_state)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return out, dict(zip(leaves, gradients, strict=True))


@pytest.mark.parametrize("lengths", [None, (3, 0, 20, 1)])
def test_float32_forward_and_backward(lengths):
    """The same solver runs once more for the gradients, which are those of the solution."""
    x = operator.make(1 if lengths else 2, 24, None if lengths is None else len(lengths))
    x = {name: y.float() for name, y in x.items()}
    offsets = None if lengths is None else pack(lengths)
    out, found = run(x, "triton", offsets)
    expected, exact = run({name: y.double() for name, y in x.items()}, None, offsets)
    own = run(x, "torch", offsets)
    errors = relative_rms(out.o, expected.o), relative_rms(own[0].o, expected.o)
    assert errors[0] <= max(2 * errors[1], 1e-6)
    assert_close(out.final_state.values, expected.final_state.values, dtype=torch.float32)
    for name, gradient in found.items():
        bar = max(2 * relative_rms(own[1][name], exact[name]), 5e-6)
        assert relative_rms(gradient, exact[name]) <= bar, name


def test_float16_inputs_are_rounded_once():
    x = operator.make(tokens=24)
    narrow = {n: y.half() if n in ("q", "k", "v") else y.float() for n, y in x.items()}
    out, found = run(narrow, "triton")
    expected, exact = run({name: y.double() for name, y in narrow.items()}, None)
    assert out.o.dtype == torch.float16
    assert relative_rms(out.o, expected.o) < 2**-10
    for name, gradient in found.items():
        assert gradient.dtype == narrow[name].dtype
        # The loss reads the outputs, which are rounded.
        assert relative_rms(gradient, exact[name]) < 2**-9, name


def test_the_registered_operator_keeps_its_promises():
    covariance, b = systems(size=3, channels=3)
    tests = ("test_schema", "test_faketensor")
    found = torch.library.opcheck(
        iterations_operator.operator, (*covariance, b, 2), test_utils=tests
    )
    assert set(found.values()) == {"SUCCESS"}
