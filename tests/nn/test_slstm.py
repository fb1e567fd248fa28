"""sLSTM against the cell of its paper, and its starting values."""

import torch
import torch.nn.functional as F

from deltarule.nn import SLSTM
from nn.layers import inputs, make
from oracles import slstm
from tolerance import relative_rms

DOUBLE = torch.float64
T = 10


@torch.no_grad()
def test_slstm_by_hand():
    layer, x = make("slstm", DOUBLE), inputs(1, T, DOUBLE)
    weight = layer.x_conv.weight
    convolved = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], groups=len(weight))).mT
    given = {"i": convolved, "f": convolved, "v": x, "r": x}
    gates = [
        getattr(layer, f"{name}_proj")(y)[0].unflatten(1, (2, 8)) + layer.gate_bias[:, index]
        for index, (name, y) in enumerate(given.items())
    ]
    recurrent = dict(zip("ifzo", layer.recurrent.unbind(1), strict=True))
    h, last = slstm.recurrence(*gates, recurrent)
    mean, variance = h.mean(-1, keepdim=True), h.var(-1, keepdim=True, correction=0)
    normed = ((h - mean) / torch.sqrt(variance + layer.norm_eps)).flatten(1)
    expected = layer.o_proj(normed * layer.o_norm.weight + layer.o_norm.bias)
    y, state = layer(x)
    assert relative_rms(y[0], expected) <= 1e-12
    assert relative_rms(state["recurrent"][0], torch.stack(last, 1)) <= 1e-12


def test_starting_values():
    layer = SLSTM(64, num_heads=2)
    assert torch.equal(layer.gate_bias[:, 1], torch.linspace(3, 6, 32).expand(2, 32))
    assert (layer.gate_bias[:, [0, 2, 3]] == 0).all()
    assert (layer.recurrent == 0).all()
    assert layer.recurrent.shape == (2, 4, 32, 32)
