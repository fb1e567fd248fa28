"""The schedule, which tensors decay, and the optimizer's state by name."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from deltarule.train.optimizer import OptimizerOptions, decays, learning_rate, make_optimizer
from small import small_model


def rates(steps, **options):
    return [learning_rate(step, steps, OptimizerOptions(**options)) for step in range(steps)]


def test_learning_rate_warms_up_and_ends_at_the_ratio():
    found = rates(20, lr=2.0, warmup_steps=4, min_lr_ratio=0.25)
    assert found[:4] == [0.5, 1.0, 1.5, 2.0]
    assert all(a > b for a, b in pairwise(found[3:]))
    assert found[-1] == pytest.approx(0.5)
    assert found[11] == pytest.approx(2.0 * (0.25 + 0.75 / 2))
    # A run shorter than its warm-up still reaches the peak.
    assert max(rates(20, lr=1.0, warmup_steps=100)) > 0.95


def test_a_warm_up_may_start_above_zero():
    """From 3e-5 to 3e-4."""
    found = rates(10_000, lr=3e-4, warmup_steps=1000, start_lr_ratio=0.1, min_lr_ratio=0.1)
    assert found[0] == pytest.approx(3e-5, rel=0.01)
    assert found[999] == max(found) == pytest.approx(3e-4)
    steps = [b - a for a, b in pairwise(found[:1000])]
    assert max(steps) == pytest.approx(min(steps))
    assert found[-1] == pytest.approx(3e-5)


def test_only_plain_matrices_decay():
    table = decays(small_model())
    decayed = {name for name, decay in table.items() if decay}
    assert {"blocks.0.mixer.q_proj.weight", "blocks.0.mlp.down_proj.weight"} <= decayed
    for part in ("norm", "embedding", "a_proj", "b_proj", "A_log", "dt_bias", "bias"):
        assert not any(part in name for name in decayed)
    assert any("a_proj" in name for name in table)


def test_a_tied_head_is_respected():
    model = nn.Module()
    model.embedding, model.head = nn.Embedding(4, 3), nn.Linear(3, 4)
    model.head.weight = model.embedding.weight
    model.plain = nn.Parameter(torch.ones(3, 3))
    assert [name for name, decay in decays(model).items() if decay] == ["plain"]
    table = decays(model, decay_embeddings=True)
    assert [name for name, decay in table.items() if decay] == ["plain", "embedding.weight"]


def test_weight_decay_moves_decayed_tensors_only():
    model = small_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    make_optimizer(model, OptimizerOptions(lr=0.5, weight_decay=0.1)).step()
    for name, parameter in model.named_parameters():
        expected = before[name] * (0.95 if decays(model)[name] else 1.0)
        torch.testing.assert_close(parameter.detach(), expected)
