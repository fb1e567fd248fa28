"""Titans' blocks against tests/oracles/titans_blocks.py, with the layer's own memory and sizes."""

import pytest
import torch

from deltarule.nn import MIXERS, State
from deltarule.nn.rotation import rotate
from nn.layers import HIDDEN, inputs, make
from oracles import titans_blocks as blocks
from tolerance import relative_rms

DOUBLE = torch.float64
T = 17


class Memory:
    """The layer's memory as the oracle takes it: write returns what each token reads at its own.

    So does the first reading after it: MAC's second is after each token, not after the segment.
    """

    def __init__(self, layer):
        self.layer, self.state, self.written = layer, layer.memory.init_state(1), None

    def write(self, tokens):
        y, self.state = self.layer.memory(tokens[None], self.state)
        self.written = y[0]
        return y[0]

    def read(self, tokens):
        if self.written is not None:
            written, self.written = self.written, None
            return written
        maps = [self.state[name] for name in self.layer.memory.names("recurrent")]
        names = self.layer.memory.names("segment")
        return self.layer.recall(tokens[None], State(zip(names, maps, strict=True)))[0]


def attention(layer, visible, positions=None):
    """Softmax attention with the layer's projections; visible(rows, prefix) is a mask."""

    def attend(x, prefix):
        at = torch.arange(len(x)) if positions is None else positions(len(x), prefix)
        q, k, v = (
            getattr(layer, f"{name}_proj")(x).view(len(x), layer.num_heads, -1) for name in "qkv"
        )
        q, k = (rotate(y[None], at[None], layer.rope_theta)[0] for y in (q, k))
        scores = torch.einsum("ihd, jhd -> hij", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~visible(len(x), prefix), -torch.inf).softmax(-1)
        return layer.o_proj(torch.einsum("hij, jhd -> ihd", weights, v).flatten(1))

    return attend


def windowed(window):
    def visible(rows, prefix):
        behind = torch.arange(rows)[:, None] - torch.arange(rows)
        return (behind >= 0) & ((behind < window) | (torch.arange(rows) < prefix))

    return visible


def gate(layer):
    return blocks.sigmoid_gate(layer.o_norm.weight, layer.m_norm.weight, 1e-5)


@torch.no_grad()
def test_memory_as_gate():
    layer, x = make("titans_mag", DOUBLE), inputs(1, T, DOUBLE)
    found = blocks.as_gate(
        x[0], layer.persistent, Memory(layer), attention(layer, windowed(layer.window)), gate(layer)
    )
    assert relative_rms(layer(x)[0][0], found) <= 1e-12


@torch.no_grad()
def test_memory_as_layer():
    layer, x = make("titans_mal", DOUBLE), inputs(1, T, DOUBLE)
    attend = attention(layer, windowed(layer.window))
    found = blocks.as_layer(x[0], layer.persistent, Memory(layer), attend)
    assert relative_rms(layer(x)[0][0], found) <= 1e-12


@torch.no_grad()
def test_memory_as_context():
    """In print a token sees the h of later ones, and the memory after them: here it does not."""
    layer, x = make("titans_mac", DOUBLE), inputs(1, T, DOUBLE)
    segment, learned = layer.window, layer.num_persistent

    def visible(rows, prefix):
        own = torch.arange(rows)
        size = rows - prefix
        place = torch.where(own < prefix, own - learned, own - prefix)
        assert size <= segment
        return (own < learned) | ((place <= place[:, None]) & (own[:, None] >= learned))

    def positions(rows, prefix):
        own = torch.arange(rows)
        return torch.where(own < prefix, own, own - prefix + learned + segment)

    attend = attention(layer, visible, positions)
    found = blocks.as_context(x[0], layer.persistent, Memory(layer), attend, gate(layer), segment)
    assert relative_rms(layer(x)[0][0], found) <= 1e-12


@pytest.mark.parametrize("name", ["titans_mac", "titans_mag", "titans_mal"])
def test_learned_tokens_are_learned_and_may_be_none(name):
    layer = make(name)
    layer(inputs(1, 9))[0].square().sum().backward()
    assert (layer.persistent.grad.abs().sum(1) > 0).all()
    without = MIXERS[name](HIDDEN, num_heads=2, num_persistent=0, window=5)
    assert without(inputs(2, 9))[0].shape == (2, 9, HIDDEN)
