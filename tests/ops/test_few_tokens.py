"""Calls of a few tokens without gradients: they go token by token, and give the same numbers."""

from unittest.mock import patch

import pytest
import torch

from deltarule import mesa, selective_scan, two_memories
from deltarule.nn import RULES
from deltarule.nn.delta_mixer import ops as layer_ops
from deltarule.nn.state import LentState
from deltarule.ops.mesa import torch as mesa_chunks
from deltarule.ops.selective_scan import torch as scan_chunks
from deltarule.shapes import MesaState
from nn.layers import inputs, make
from tolerance import relative_rms

B, T, H, HV, V, K = 2, 5, 2, 4, 3, 6
DOUBLE = torch.float64


def drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=DOUBLE)


def scan_arguments(name: str) -> dict:
    each, state = drawn(B, T, HV, V), drawn(B, HV, V, K)
    common = {"q": drawn(B, T, H, K), "k": drawn(B, T, H, K), "v": each, "initial_state": state}
    others = {
        "mamba": {"delta": drawn(B, T, HV, V).abs(), "A": -drawn(HV, V, K).abs()},
        "s4": {"q": drawn(HV, V, K), "k": drawn(HV, V, K)},
        "dfw": {
            "value_log_decay": -drawn(B, T, HV, V).abs(), "log_decay": -drawn(B, T, HV, K).abs()
        },
        "longhorn": {"beta": drawn(B, T, HV, V).sigmoid() / K},
        "fresh": {"initial_state": None},
    }  # fmt: skip
    return common | others[name]


@pytest.mark.parametrize("name", ["mamba", "s4", "dfw", "longhorn", "fresh"])
def test_selective_scan_takes_few_tokens_one_by_one(name):
    arguments = scan_arguments(name)
    expected = selective_scan(**arguments, impl="reference")
    before = arguments["initial_state"] if name == "fresh" else arguments["initial_state"].clone()
    with torch.no_grad(), patch.object(scan_chunks, "forward", side_effect=AssertionError):
        o, state = selective_scan(**arguments)
    assert relative_rms(o, expected.o) < 1e-13
    assert relative_rms(state, expected.final_state) < 1e-13
    assert before is None or torch.equal(arguments["initial_state"], before)


@pytest.mark.parametrize("iterations", [None, 30])
def test_mesa_takes_few_tokens_one_by_one(iterations):
    k = torch.nn.functional.normalize(drawn(B, T, H, K), dim=-1)
    root = drawn(B, HV, K, K)
    arguments = {
        "q": drawn(B, T, H, K), "k": k, "v": drawn(B, T, HV, V), "beta": drawn(B, T, HV).sigmoid(),
        "log_decay": -drawn(B, T, HV).abs(), "regularizer": torch.ones(HV, K, dtype=DOUBLE),
        "iterations": iterations, "initial_state": MesaState(root @ root.mT, drawn(B, HV, V, K)),
    }  # fmt: skip
    expected = mesa(**arguments, impl="reference")
    with torch.no_grad(), patch.object(mesa_chunks, "chunk_states", side_effect=AssertionError):
        o, state = mesa(**arguments)
    assert relative_rms(o, expected.o) < 1e-10
    for part, other in zip(state, expected.final_state, strict=True):
        assert relative_rms(part, other) < 1e-13


@pytest.mark.parametrize("continued", [False, True])
def test_two_memories_take_few_tokens_one_by_one(continued):
    slots = drawn(B, T, H, 7).sigmoid()
    memories = {"key_memory": drawn(B, H, 7, K), "value_memory": drawn(B, H, V, 7)}
    arguments = {
        "q": drawn(B, T, H, K), "k": drawn(B, T, H, K), "v": drawn(B, T, H, V), "slots": slots,
        "log_decay": -drawn(B, T, H, 7).abs(), **(memories if continued else {}),
    }  # fmt: skip
    expected = two_memories(**arguments, impl="reference")
    chunks = "deltarule.ops.two_memories.delta_rule"
    with torch.no_grad(), patch(chunks, side_effect=AssertionError):
        found = two_memories(**arguments)
    for part, other in zip(found, expected, strict=True):
        assert relative_rms(part, other) < 1e-13


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
