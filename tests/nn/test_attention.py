"""Softmax attention against its sum, and the rows that its state keeps."""

import math

import pytest
import torch

import deltarule
from deltarule.nn import MIXERS, Attention, SlidingWindowAttention
from deltarule.nn.layout import make_layout
from deltarule.nn.masked_attention import Sight
from deltarule.nn.rotation import rotate
from nn.layers import HIDDEN, inputs, make
from tolerance import relative_rms


def by_hand(layer, x):
    """Loop over every query, head and visible key."""
    heads = {"q": layer.num_heads, "k": layer.num_kv_heads, "v": layer.num_kv_heads}
    q, k, v = (
        getattr(layer, f"{name}_proj")(x).view(*x.shape[:2], count, layer.head_dim)
        for name, count in heads.items()
    )
    if layer.rope_theta is not None:
        positions = torch.arange(x.shape[1])[None]
        q, k = rotate(q, positions, layer.rope_theta), rotate(k, positions, layer.rope_theta)
    o = torch.zeros_like(q)
    for row in range(x.shape[0]):
        for head in range(layer.num_heads):
            kv_head = head * layer.num_kv_heads // layer.num_heads
            for t in range(x.shape[1]):
                first = 0 if layer.window is None else max(0, t + 1 - layer.window)
                scores = k[row, first : t + 1, kv_head] @ q[row, t, head]
                shares = torch.softmax(scores / math.sqrt(layer.head_dim), dim=0)
                o[row, t, head] = shares @ v[row, first : t + 1, kv_head]
    return layer.o_proj(o.flatten(-2))


@pytest.mark.parametrize("window", [None, 1, 3, 12, 13, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("theta", [None, 100.0])
def test_equals_its_sum(window, kv_heads, theta):
    options = {"num_heads": 4, "num_kv_heads": kv_heads, "window": window, "rope_theta": theta}
    layer, x = Attention(HIDDEN, **options).double(), inputs(2, 13, torch.float64)
    with torch.no_grad():
        assert relative_rms(layer(x)[0], by_hand(layer, x)) <= 1e-12


def test_full_attention_keeps_one_row_a_token():
    layer = Attention(HIDDEN, num_heads=2, num_kv_heads=1)
    _, state = layer(inputs(2, 7))
    _, state = layer(inputs(2, 1), state)
    assert state["keys"].shape == state["values"].shape == (2, 8, 1, 16)
    assert state["valid"].all()
    assert state["length"].tolist() == [8, 8]


def test_sliding_window_state_is_bounded():
    layer = SlidingWindowAttention(HIDDEN, num_heads=2, window=4)
    _, state = layer(inputs(1, 50))
    for _ in range(3):
        assert state["keys"].shape[1] <= 4
        assert state["keys"].untyped_storage().nbytes() <= 4 * HIDDEN * 4
        _, state = layer(inputs(1, 1), state)
    assert state["length"].tolist() == [53]


def test_default_window():
    assert SlidingWindowAttention(HIDDEN, num_heads=2).window == 2048
    assert Attention(HIDDEN, num_heads=2).window is None


def test_packed_attention_takes_no_state():
    layer, x = Attention(HIDDEN, num_heads=2), inputs(1, 4)
    _, state = layer(x)
    with pytest.raises(ValueError, match="state must be None with cu_seqlens"):
        layer(x, state, cu_seqlens=deltarule.pack([4]))


@pytest.mark.parametrize("name", ["attention", "sliding_window"])
def test_weights_are_those_that_forward_applies(name):
    layer, x = make(name, torch.float64), inputs(2, 11, torch.float64)
    weights = layer.weights(x)
    v = layer.v_proj(x).view(2, 11, layer.num_kv_heads, -1)
    v = v.repeat_interleave(layer.num_heads // layer.num_kv_heads, 2)
    o = torch.einsum("bhij, bjhd -> bihd", weights, v).flatten(2)
    assert relative_rms(layer.o_proj(o), layer(x)[0]) <= 1e-12


@pytest.mark.parametrize("lengths", [None, [40], [1, 16, 2, 21], [3, 0, 37], [8, 8, 24]])
@pytest.mark.parametrize("window", [1, 3, 8, 39])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_blocks_equal_the_mask_of_all_pairs(lengths, window, kv_heads):
    """Outputs and gradients, whatever place the sequences begin at in their blocks."""
    layer = Attention(HIDDEN, num_heads=4, num_kv_heads=kv_heads, window=window).double()
    x = inputs(2 if lengths is None else 1, 40, torch.float64).requires_grad_()
    cu_seqlens = None if lengths is None else deltarule.pack(lengths)
    y, _ = layer(x, cu_seqlens=cu_seqlens)
    layout = make_layout(x, cu_seqlens, None)
    before = layer.state_before(None, layout)
    q, k, v = layer._project(x, layout.positions(before["length"]))
    _, visible = Sight(40, 40, x.device, window, layout.sequence).mask(0, 40)
    o = layer._attend(q, k, v, visible)
    expected = layer.o_proj(o.flatten(-2))
    assert relative_rms(y, expected) <= 1e-12
    grad = torch.randn_like(y)
    ours, theirs = (
        torch.autograd.grad(out, x, grad, retain_graph=True)[0] for out in (y, expected)
    )
    assert relative_rms(ours, theirs) <= 1e-12


def test_a_window_makes_no_mask_of_all_pairs(monkeypatch):
    asked = []
    attend = Attention._attend

    def noted(self, q, k, v, visible):
        asked.append(0 if visible is None else visible.numel())
        return attend(self, q, k, v, visible)

    monkeypatch.setattr(Attention, "_attend", noted)
    SlidingWindowAttention(HIDDEN, num_heads=2, window=16)(inputs(1, 1024))
    assert asked == [0, 16 * 32]


HEADS, TOKENS, WINDOW = 2, 12, 5


@pytest.mark.parametrize(("name", "window"), [("attention", TOKENS), ("sliding_window", WINDOW)])
def test_reads_the_minimiser_of_its_objective(name, window):
    """sum_j exp(q . k_j / sqrt(K)) |o - v_j|^2 over the tokens that are seen: its gradient is 0."""
    options = {"window": window} if name == "sliding_window" else {}
    layer = MIXERS[name](HIDDEN, num_heads=HEADS, **options).double()
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64)
    layout = make_layout(x, None, None)
    q, k, v = layer._project(x, layout.positions(layer.state_before(None, layout)["length"]))
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
