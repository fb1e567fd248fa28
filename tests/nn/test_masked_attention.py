"""Attention of packed and continued tokens in tiles: the numbers of one mask, and memory of T."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import deltarule
from deltarule.nn import Attention, SlidingWindowAttention, masked_attention
from nn.layers import HIDDEN, inputs
from tolerance import relative_rms

DOUBLE = torch.float64
LENGTHS = [1, 0, 30, 9]


def make(window=None, kv_heads=2):
    torch.manual_seed(0)
    layer = Attention if window is None else SlidingWindowAttention
    return layer(HIDDEN, num_heads=4, num_kv_heads=kv_heads, window=window).double()


def outputs_and_gradients(layer, x, *given, **options):
    x = x.clone().requires_grad_()
    y, _ = layer(x, *given, **options)
    parameters = x, *layer.parameters()
    return [y, *torch.autograd.grad(y.sin().sum(), parameters)]


def cases():
    """Calls whose tokens do not see all before them."""
    yield "packed", None, {"cu_seqlens": deltarule.pack(LENGTHS)}, 1
    for window in (None, 7, 60):
        yield f"continued, window {window}", window, {}, 2


@pytest.mark.parametrize(("name", "window", "options", "batch"), list(cases()))
@pytest.mark.parametrize("padded", [False, True])
def test_tiles_equal_one_mask(name, window, options, batch, padded, monkeypatch):
    layer, x = make(window), inputs(batch, 40, DOUBLE)
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
    layer, kept = make().float(), {}

    def keep(x):
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    x = inputs(1, tokens)
    given = () if packed else (layer(x)[1].detach(),)
    options = {"cu_seqlens": deltarule.pack([tokens // 4] * 4)} if packed else {}
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y, _ = layer(x, *given, **options)
        y.sum().backward()
    return largest.numbers, sum(kept.values())


@pytest.mark.parametrize("packed", [False, True])
def test_memory_grows_with_the_tokens_not_with_their_square(packed, monkeypatch):
    monkeypatch.setattr(masked_attention, "ROWS", 64)
    small, large = memory(512, packed), memory(2048, packed)
    for one, four in zip(small, large, strict=True):
        assert four <= 4.2 * one
    # One mask of all pairs would be as large as this.
    assert large[0] < 2048 * 2048
