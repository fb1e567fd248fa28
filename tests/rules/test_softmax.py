"""The objective that the softmax rows state: what is read minimises it exactly."""

import pytest
import torch

from deltarule.nn import MIXERS
from deltarule.nn.layout import make_layout

HIDDEN, HEADS, TOKENS, WINDOW = 16, 2, 12, 5


@pytest.mark.parametrize(("name", "window"), [("attention", TOKENS), ("sliding_window", WINDOW)])
def test_reads_the_minimiser_of_its_objective(name, window):
    """sum_j exp(q . k_j / sqrt(K)) |o - v_j|^2 over the tokens that are seen: its gradient is 0."""
    options = {"window": window} if name == "sliding_window" else {}
    layer = MIXERS[name](HIDDEN, num_heads=HEADS, **options).double()
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64)
    layout = make_layout(x, None, None)
    q, k, v = layer._project(x, layout.positions(layer._state_before(None, layout)["length"]))
    identity = torch.eye(HIDDEN, dtype=torch.float64)
    layer.o_proj.weight.data = identity
    o = layer(x)[0].unflatten(-1, (HEADS, -1)).requires_grad_()
    similar = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    ahead = torch.arange(TOKENS) - torch.arange(TOKENS)[:, None]
    seen = (ahead <= 0) & (ahead > -window)
    weights = similar.exp() * seen

    def slope(o):
        misses = (o[:, :, None] - v[:, None]).square().sum(-1)
        return torch.autograd.grad(torch.einsum("bhts,btsh->", weights, misses), o)[0].abs().max()

    assert slope(o) <= 1e-10
    assert slope(o + 0.01) > 1e-3
