"""The benchmark of the 1.3 B model, with a few channels and a peer of nothing."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from bench.model import build_fla, time_model

TINY = {"batch": 2, "tokens": 8, "sizes": (17, 32, 1, 2, 32), "steps": 1, "warm_up": 0}


def test_steps_of_ours_are_timed_on_a_cpu():
    row = time_model(TINY, "deltarule", "cpu")
    assert row["tokens_per_s"] > 0
    assert row["peak_GiB"] is None


@pytest.mark.parametrize("whole_logits", [True, False])
def test_a_peer_takes_one_fused_loss_or_the_other(whole_logits, monkeypatch):
    seen = []

    def built(config):
        seen.append((config.fuse_cross_entropy, config.fuse_linear_cross_entropy))
        return nn.Linear(1, 1)

    models = ModuleType("fla.models")
    models.DeltaNetConfig, models.DeltaNetForCausalLM = SimpleNamespace, built
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.models", models)
    model, _ = build_fla("DeltaNet", {}, "cpu", whole_logits=whole_logits)
    assert next(model.parameters()).dtype == torch.bfloat16
    assert seen == [(whole_logits, not whole_logits)]
