"""`long_convolution` and what runs on it on a CUDA device, against float64."""

import copy

import pytest
import torch

import deltarule
from deltarule import pack
from nn.layers import inputs, make
from ops.test_long_convolution import KEYS, LENGTHS, gradients
from ops.test_long_convolution import make as call
from tolerance import assert_close, relative_rms

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("keys", KEYS)
def test_float32(keys, packed):
    given = call(keys, sum(LENGTHS), 50, batch=1 if packed else 2, dtype=torch.float32)
    given = {name: x.cuda() for name, x in given.items()}
    options = {"cu_seqlens": pack(LENGTHS).cuda()} if packed else {}
    exact = gradients({name: x.double() for name, x in given.items()}, **options)
    found = gradients(given, **options)
    assert_close(found[0], exact[0], name="o")
    for name, x, y in zip(given, found[2], exact[2], strict=True):
        assert_close(x, y, gradient=True, name=name)
    assert deltarule.long_convolution(**given, **options).o.isfinite().all()


@pytest.mark.parametrize("name", ["hyena", "multi_head_hyena", "slstm", "block_deltanet"])
def test_layers(name):
    layer, x = make(name).cuda(), inputs(2, 40).cuda()
    exact = copy.deepcopy(layer).double()
    y, state = layer(x[:, :25])
    second, _ = layer(x[:, 25:], state)
    expected = exact(x.double())[0]
    assert relative_rms(torch.cat([y, second], 1), expected) < 1e-4
    whole = layer(x)[0]
    assert relative_rms(whole, expected) < 1e-4
    whole.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
