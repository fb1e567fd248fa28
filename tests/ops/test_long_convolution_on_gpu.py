"""`long_convolution` and what runs on it on a CUDA device, against float64."""

import copy

import pytest
import torch

from nn.layers import inputs, make
from tolerance import relative_rms

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["hyena", "multi_head_hyena", "slstm", "block_deltanet"])
def test_layers(name):
    layer, x = make(name).cuda(), inputs(2, 40).cuda()
    exact = copy.deepcopy(layer).double()
    if hasattr(layer, "taps"):
        # What makes filters takes three sines of 14 times its input: float32 leaves it 1e-4.
        exact.taps = lambda: layer.taps().double()
    y, state = layer(x[:, :25])
    second, _ = layer(x[:, 25:], state)
    expected = exact(x.double())[0]
    assert relative_rms(torch.cat([y, second], 1), expected) < 1e-4
    whole = layer(x)[0]
    assert relative_rms(whole, expected) < 1e-4
    whole.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
