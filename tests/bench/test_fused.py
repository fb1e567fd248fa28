"""The comparison of the fused kernels with Triton's stages, without a GPU."""

import pytest

from bench import fused
from promised import promised

promised("triton")

from deltarule.ops.delta_rule.gluon import stage


def test_a_variant_is_turned_on_and_off_again():
    fills, timed = stage.fills, stage.STEPS_TIMED
    with fused.variant("fused"):
        assert stage.fills(None, 132)
        assert (stage.TRAINING, stage.STEPS_TIMED) == (True, 2)
    with fused.variant("triton"):
        assert not stage.fills(None, 132)
        assert not stage.TRAINING
    assert stage.fills == fills
    assert stage.TRAINING
    assert timed == stage.STEPS_TIMED


@pytest.mark.parametrize("name", fused.CASES)
def test_every_call_runs(name, monkeypatch):
    monkeypatch.setattr(fused, "REPEATS", 1)
    case = fused.CASES[name]
    lengths = (3, 4) if case.lengths else ()
    small = case._replace(batch=1, tokens=7, heads=1, value_heads=2, size=8, lengths=lengths)
    assert [variant for variant, _ in fused.figures(small, "cpu")] == ["triton", "fused", "chosen"]
