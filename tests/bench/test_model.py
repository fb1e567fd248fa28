"""The benchmark of the 1.3 B model, with a few channels and a peer of nothing."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from bench.model import build_fla, time_model
from deltarule.models import ModelConfig

SIZES = {"vocab_size": 17, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "mlp_size": 32}
TINY = {"batch": 2, "tokens": 8, "sizes": SIZES, "steps": 1, "warm_up": 0}


def test_steps_of_ours_are_timed_on_a_cpu():
    row = time_model(TINY, "deltarule", "cpu")
    assert row["tokens_per_s"] > 0
    assert row["peak_GiB"] is None


@pytest.mark.parametrize("whole_logits", [True, False])
def test_a_peer_takes_our_sizes_and_one_fused_loss_or_the_other(whole_logits, monkeypatch):
    seen = []

    def built(config):
        seen.append(vars(config))
        return nn.Linear(1, 1)

    models = ModuleType("fla.models")
    models.DeltaNetConfig, models.DeltaNetForCausalLM = SimpleNamespace, built
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.models", models)
    ours = ModelConfig(layer_types="deltanet", tie_embeddings=False, **SIZES)
    model, _ = build_fla("DeltaNet", ours, {"use_gate": False}, "cpu", whole_logits=whole_logits)
    assert next(model.parameters()).dtype == torch.bfloat16
    (told,) = seen
    assert told == {
        "vocab_size": 17,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "tie_word_embeddings": False,
        "use_gate": False,
        "fuse_cross_entropy": whole_logits,
        "fuse_linear_cross_entropy": not whole_logits,
    }
