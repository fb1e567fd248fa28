"""Softmax attention, full, in tiles and latent, against its sum, and the rows that it keeps."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import deltarule
from deltarule.nn import Attention, LatentAttention, SlidingWindowAttention, masked_attention
from deltarule.nn.rotation import rotate
from nn.layers import HIDDEN, inputs, make
from nodes import kept
from oracles import rotary
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


def test_sliding_window_state_is_bounded():
    layer = SlidingWindowAttention(HIDDEN, num_heads=2, window=4)
    _, state = layer(inputs(1, 50))
    for _ in range(3):
        assert state["keys"].shape[1] <= 4
        assert state["keys"].untyped_storage().nbytes() <= 4 * HIDDEN * 4
        _, state = layer(inputs(1, 1), state)
    assert state["length"].tolist() == [53]


@pytest.mark.parametrize("window", [1, 4, 8])
def test_a_state_with_more_rows_than_the_window_reaches_is_refused(window):
    wide, layer = (Attention(HIDDEN, num_heads=2, window=size) for size in (None, window))
    _, state = wide(inputs(2, window))
    for tokens in (1, 20):
        with pytest.raises(ValueError, match=f"must be .2, {window - 1}, .*got .2, {window},"):
            layer(inputs(2, tokens), state)


def test_default_window():
    assert SlidingWindowAttention(HIDDEN, num_heads=2).window == 2048
    assert Attention(HIDDEN, num_heads=2).window is None


def test_packed_attention_takes_no_state():
    layer, x = Attention(HIDDEN, num_heads=2), inputs(1, 4)
    _, state = layer(x)
    # What a packed call returns goes on with nothing, either.
    _, packed = layer(x, cu_seqlens=deltarule.pack([4]))
    for given in (state, packed):
        with pytest.raises(ValueError, match="state must be None with cu_seqlens"):
            layer(x, given, cu_seqlens=deltarule.pack([4]))


@pytest.mark.parametrize("lengths", [None, [40], [1, 16, 2, 21], [3, 0, 37], [8, 8, 24]])
@pytest.mark.parametrize("window", [1, 3, 8, 39])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_blocks_equal_the_sum_of_each_sequence(lengths, window, kv_heads):
    """Outputs and gradients, whatever place the sequences begin at in their blocks."""
    layer = Attention(HIDDEN, num_heads=4, num_kv_heads=kv_heads, window=window).double()
    x = inputs(2 if lengths is None else 1, 40, torch.float64).requires_grad_()
    y, _ = layer(x, cu_seqlens=None if lengths is None else deltarule.pack(lengths))
    expected = torch.cat([by_hand(layer, part) for part in x.split(lengths or 40, 1)], 1)
    assert relative_rms(y, expected) <= 1e-12
    d_y = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(out, x, d_y, retain_graph=True)[0] for out in (y, expected))
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


DOUBLE = torch.float64
LENGTHS = [1, 0, 30, 9]


def windowed(window=None, kv_heads=2):
    torch.manual_seed(0)
    layer = Attention if window is None else SlidingWindowAttention
    return layer(HIDDEN, num_heads=4, num_kv_heads=kv_heads, window=window).double()


def outputs_and_gradients(layer, x, *given, **options):
    x = x.clone().requires_grad_()
    y, _ = layer(x, *given, **options)
    parameters = x, *layer.parameters()
    return [y, *torch.autograd.grad(y.sin().sum(), parameters)]


# Calls whose tokens do not see all before them: packed, and continued with a window or none.
@pytest.mark.parametrize(
    ("window", "options", "batch"),
    [(None, {"cu_seqlens": deltarule.pack(LENGTHS)}, 1), (None, {}, 2), (7, {}, 2), (60, {}, 2)],
)
@pytest.mark.parametrize("padded", [False, True])
def test_tiles_equal_one_mask(window, options, batch, padded, monkeypatch):
    layer, x = windowed(window), inputs(batch, 40, DOUBLE)
    given = ()
    if not options:
        mask = torch.ones(batch, 25, dtype=torch.bool)
        if padded:
            mask[0, 3:9], mask[1, :20] = False, False
        with torch.no_grad():
            given = (layer(inputs(batch, 25, DOUBLE) + 1, mask=mask)[1],)
    expected = outputs_and_gradients(layer, x, *given, **options)
    monkeypatch.setattr(masked_attention, "ROWS", 16)
    found = outputs_and_gradients(layer, x, *given, **options)
    for one, other in zip(found, expected, strict=True):
        assert relative_rms(one, other) <= 1e-12
    with torch.no_grad():
        assert relative_rms(layer(x, *given, **options)[0], expected[0]) <= 1e-12


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that anything returns."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes())
        return out


def memory(tokens, packed):
    """Bytes of the largest tensor of a call with its backward, and of what the backward is kept."""
    layer, x = windowed().float(), inputs(1, tokens)
    given = () if packed else (layer(x)[1].detach(),)
    options = {"cu_seqlens": deltarule.pack([tokens // 4] * 4)} if packed else {}
    with Largest() as largest, kept() as tensors:
        y, _ = layer(x, *given, **options)
        y.sum().backward()
    storages = {x.data_ptr(): x.nbytes() for x in map(torch.Tensor.untyped_storage, tensors)}
    return largest.numbers, sum(storages.values())


@pytest.mark.parametrize("packed", [False, True])
def test_memory_grows_with_the_tokens_not_with_their_square(packed, monkeypatch):
    monkeypatch.setattr(masked_attention, "ROWS", 64)
    small, large = memory(512, packed), memory(2048, packed)
    for one, four in zip(small, large, strict=True):
        assert four <= 4.2 * one
    # One mask of all pairs would be as large as this.
    assert large[0] < 2048 * 2048


SIZES = {"num_heads": 3, "kv_lora_rank": 8}
SIZES |= {"qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 6}


def latent(**options):
    torch.manual_seed(0)
    layer = LatentAttention(16, **SIZES | options).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return layer


def test_a_part_of_a_key_is_not_negative():
    with pytest.raises(ValueError, match=r"qk_rope_head_dim must be .* 0 or more, got -2"):
        latent(qk_rope_head_dim=-2)


def latent_by_hand(layer, x, theta=None):
    """Head by head and token by token."""
    heads, nope = layer.num_heads, SIZES["qk_nope_head_dim"]
    rows = []
    for t, token in enumerate(x):
        kept = layer.kv_a_proj.weight @ token
        latent, shared = kept[: layer.latent], kept[layer.latent :]
        latent = latent * torch.rsqrt(latent.square().mean() + 1e-6) * layer.kv_norm.weight
        both = (layer.kv_b_proj.weight @ latent).view(heads, -1)
        q = (layer.q_proj.weight @ token).view(heads, -1)
        if theta is not None:
            place, rates = torch.tensor([t]), rotary.frequencies(len(shared), theta)
            shared = rotary.rotate(shared[None], place, rates)[0]
            turned = rotary.rotate(q[:, nope:], place.expand(heads), rates)
            q = torch.cat([q[:, :nope], turned], 1)
        k = torch.cat([both[:, :nope], shared.expand(heads, -1)], 1)
        rows.append((q, k, both[:, nope:]))
    outputs = []
    for t, (q, _, _) in enumerate(rows):
        scores = torch.stack([(q * k).sum(1) for _, k, _ in rows[: t + 1]], 1) * layer.scale
        o = sum(w[:, None] * v for w, (_, _, v) in zip(scores.softmax(1).T, rows, strict=False))
        outputs.append(layer.o_proj.weight @ o.flatten())
    return torch.stack(outputs)


@pytest.mark.parametrize("theta", [None, 100.0])
def test_both_forms_are_the_definition(theta, monkeypatch):
    layer, x = latent(rope_theta=theta), torch.randn(1, 30, 16, dtype=torch.float64)
    expected = latent_by_hand(layer, x[0], theta)
    whole, _ = layer(x)
    # Few tokens at a time go through the maps of the latent vector.
    parts, state = [], None
    for part in x.split([1, 3, 1, 25], 1):
        y, state = layer(part, state)
        parts.append(y)
    assert relative_rms(whole[0], expected) < 1e-12
    assert relative_rms(torch.cat(parts, 1)[0], expected) < 1e-12
    monkeypatch.setattr("deltarule.nn.latent_attention.is_plain", lambda module: False)
    assert relative_rms(layer(x[:, :2])[0][0], expected[:2]) < 1e-12


def test_the_state_is_one_small_vector_a_token():
    state = latent()(torch.randn(2, 7, 16, dtype=torch.float64))[1]
    assert state["keys"].shape == (2, 7, 1, 12)
    assert state["values"].numel() == 0


@pytest.mark.parametrize("name", ["attention", "sliding_window", "latent"])
def test_weights_are_those_that_forward_applies(name):
    if name == "latent":
        layer, x = latent(), torch.randn(1, 9, 16, dtype=DOUBLE)
        v = layer.expanded(layer._project(x, torch.arange(9)[None])[1])[1]
    else:
        layer, x = make(name, DOUBLE), inputs(2, 11, DOUBLE)
        v = layer.v_proj(x).view(2, 11, layer.num_kv_heads, -1)
        v = v.repeat_interleave(layer.num_heads // layer.num_kv_heads, 2)
    o = torch.einsum("bhij, bjhd -> bihd", layer.weights(x), v).flatten(2)
    assert relative_rms(layer.o_proj(o), layer(x)[0]) <= 1e-12
