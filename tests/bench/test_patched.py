"""The benchmark of transformers' models, patched and not, with models of nothing."""

import json
import sys
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers")

from bench import patched

NOTHING = {
    "hidden_size": 32, "num_hidden_layers": 4, "head_dim": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "intermediate_size": 32,
}  # fmt: skip


def tiny():
    sizes = patched.models_of("cpu")["qwen3_5"]
    options = sizes.options | NOTHING
    return sizes._replace(options=options, prefill=(2, 9), training=(1, 9), new_tokens=2)


def test_both_sides_do_the_same_and_every_time_is_kept(tmp_path):
    output = tmp_path / "patched.json"
    patched.main(output, {"qwen3_5": tiny()}, repeats=2)
    rows = json.loads(output.read_text())["rows"]
    assert [(row["work"], row["peer"]) for row in rows] == [
        (work, side)
        for work in ("prefill", "generate", "training step")
        for side in ("transformers", "deltarule")
    ]
    assert all(len(row["seconds"]) == 2 and row["ms"] > 0 for row in rows)
    assert max(row.get("difference", 0) for row in rows) < 1e-5
    assert rows[0]["theirs"]["torch_chunk_gated_delta_rule"].startswith("transformers.")


def test_with_fla_its_convolution_is_a_side_of_its_own(monkeypatch):
    def convolution(x, weight, bias, activation):
        return torch.full_like(x, 7), None

    def step(x, state, weight, bias, activation):
        return torch.full_like(x, 8), state

    fla = ModuleType("fla.modules.causal_conv1d")
    fla.causal_conv1d, fla.causal_conv1d_update = convolution, step
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.modules", ModuleType("fla.modules"))
    monkeypatch.setitem(sys.modules, "fla.modules.causal_conv1d", fla)
    model = patched.built(tiny(), "cpu")
    file = patched.file_of(model)
    before = vars(file)["causal_conv1d_fn"]
    monkeypatch.setattr(patched, "origin", lambda function: "fla.ops.gated_delta_rule.chunk")
    sides = patched.sides_of(model)
    assert list(sides) == [patched.THEIRS, patched.THEIR_CONVOLUTION, patched.OURS]
    x, weight = torch.randn(1, 4, 5), torch.randn(4, 3)
    with sides[patched.THEIR_CONVOLUTION]():
        y = file.causal_conv1d_fn(x, weight, None, activation="silu", anything=1)
        one = file.causal_conv1d_update(x[..., :1], x[..., :3], weight, None, "silu")
    assert torch.equal(y, torch.full_like(x, 7))
    assert torch.equal(one, torch.full((1, 4, 1), 8.0))
    assert file.causal_conv1d_fn is before
