"""The short convolution against PyTorch's conv1d."""

import pytest
import torch
import torch.nn.functional as F

from deltarule.nn import ShortConv
from deltarule.nn.layout import make_layout
from deltarule.nn.short_conv import convolution_from_zeros
from tolerance import relative_rms


@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_equals_conv1d(size, tokens):
    conv, x = ShortConv(6, size).double(), torch.randn(2, tokens, 6, dtype=torch.float64)
    y, history = conv(x, conv.init_history(2), make_layout(x, None, None))
    padded = F.pad(x.mT, (size - 1, 0))
    expected = F.silu(F.conv1d(padded, conv.weight.unsqueeze(1), groups=6)).mT
    assert relative_rms(y, expected) <= 1e-12
    assert torch.equal(history, padded.mT[:, tokens:])


def test_gradients():
    conv, x = ShortConv(3, 4).double(), torch.randn(2, 5, 3, dtype=torch.float64)
    history = torch.randn(2, 3, 3, dtype=torch.float64)

    def run(x, history, weight):
        given = {"weight": weight}
        return torch.func.functional_call(conv, given, (x, history, make_layout(x, None, None)))

    leaves = [t.requires_grad_() for t in (x, history, conv.weight.detach().clone())]
    assert torch.autograd.gradcheck(run, leaves)


def test_history_is_no_view_of_the_input():
    conv, x = ShortConv(3, 4), torch.randn(1, 100, 3)
    _, history = conv(x, conv.init_history(1), make_layout(x, None, None))
    assert history.untyped_storage().nbytes() == 3 * 3 * 4


@pytest.mark.parametrize("tokens", [1, 2, 300])
@pytest.mark.parametrize("afresh", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_written_out_are_those_of_conv1d_twice(tokens, afresh, bias):
    torch.manual_seed(0)
    conv, x = ShortConv(3, 4, bias=bias).double(), torch.randn(2, tokens, 3, dtype=torch.float64)
    if bias:
        torch.nn.init.normal_(conv.bias)
    leaves = [x.requires_grad_(), *conv.parameters()]
    history, layout = conv.init_history(2).double(), make_layout(x, None, None)

    def ours(x, weight, bias=None):
        if afresh:
            return convolution_from_zeros(x, weight, layout, True, bias)
        given = {"weight": weight, "bias": bias}
        return torch.func.functional_call(conv, given, (x, history, layout))[0]

    def theirs(x, weight, bias=None):
        return F.silu(F.conv1d(F.pad(x.mT, (3, 0)), weight.unsqueeze(1), bias, groups=3)).mT

    order = sorted(leaves, key=lambda leaf: -leaf.ndim)
    first = [
        torch.autograd.grad(f(*order).sin().sum(), order, create_graph=True) for f in (ours, theirs)
    ]
    second = [torch.autograd.grad(sum(g.square().sum() for g in one), order) for one in first]
    for one, other in zip(first[0] + second[0], first[1] + second[1], strict=True):
        assert relative_rms(one, other) <= 1e-12
