"""Calls of a few tokens without gradients: they go token by token, and give the same numbers."""

from importlib import import_module
from unittest.mock import patch

import pytest
import torch

from deltarule.nn import RULES
from deltarule.nn.delta_mixer import ops as layer_ops
from deltarule.nn.state import LentState
from deltarule.ops.mesa import torch as mesa_chunks
from deltarule.ops.selective_scan import torch as scan_chunks
from nn.layers import inputs, make
from ops.contract import OPERATORS
from tolerance import relative_rms

DOUBLE = torch.float64
# What the operators do with many tokens.
CHUNKS = {
    **dict.fromkeys(("mamba", "s4", "dfw", "longhorn"), (scan_chunks, "between_chunks")),
    **dict.fromkeys(("mesa", "mesa, 30 iterations"), (mesa_chunks, "chunk_states")),
    "two memories": (import_module("deltarule.ops.two_memories"), "delta_rule"),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_operators_take_few_tokens_one_by_one(name):
    x = OPERATORS[name].draw(tokens=5)
    kept = {state: x[state].clone() for state in OPERATORS[name].states}
    expected = OPERATORS[name].run(**x, impl="reference")
    with torch.no_grad(), patch.object(*CHUNKS[name], side_effect=AssertionError):
        found = OPERATORS[name].run(**x)
    assert relative_rms(found[0], expected[0]) < (1e-10 if "mesa" in name else 1e-13)
    for part, other in zip(found[1:], expected[1:], strict=True):
        assert relative_rms(part, other) < 1e-13
    assert all(torch.equal(x[state], kept[state]) for state in kept)


@pytest.mark.parametrize("name", RULES)
def test_layers_decode_with_the_step(name):
    layer, x = make(name, DOUBLE), inputs(2, 20, DOUBLE)
    with torch.no_grad():
        _, state = layer(x[:, :13])
        kept = state.clone()
        with patch.object(layer_ops, "recurrent_step", wraps=layer_ops.recurrent_step) as step:
            y, after = layer(x[:, 13:], state)
        assert step.call_count == 1
        lent = LentState(kept.clone())
        overwritten, returned = layer(x[:, 13:], lent)
    expected, whole = layer(x[:, 13:], kept)
    for given, of in ((y, after), (overwritten, returned)):
        assert relative_rms(given, expected) < 1e-12
        assert all(relative_rms(of[key], whole[key]) < 1e-12 for key in whole)
    assert all(torch.equal(state[key], kept[key]) for key in kept)
    assert not torch.equal(lent["recurrent"], kept["recurrent"])


def test_layers_do_not_decode_what_is_differentiated_packed_or_long():
    layer, x = make("gated_deltanet"), inputs(1, 17)
    with patch.object(layer_ops, "recurrent_step", side_effect=AssertionError):
        layer(x[:, :4])[0].sum().backward()
        with torch.no_grad():
            layer(x)
            layer(x[:, :4], cu_seqlens=torch.tensor([0, 1, 4]))
