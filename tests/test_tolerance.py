"""The measures that tests compare by: what they find and refuse, and where their bars are."""

import math

import pytest
import torch

from tolerance import assert_close, assert_close_to_yardstick, relative_largest, relative_rms

DOUBLE, FULL, BRAIN = torch.float64, torch.float32, torch.bfloat16
DRAWN = torch.randn(2, 64, 32, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
REFERENCE, ERROR = DRAWN[0], DRAWN[1] * DRAWN[0].norm() / DRAWN[1].norm()
YARDSTICK = REFERENCE + 1e-3 * ERROR


def test_measure():
    assert relative_rms(YARDSTICK, REFERENCE) == pytest.approx(1e-3)
    assert relative_rms(REFERENCE.float(), REFERENCE) < 1e-7
    assert relative_largest(1.25 * REFERENCE, REFERENCE) == pytest.approx(0.25)
    assert relative_rms(0 * REFERENCE, REFERENCE) == 1.0
    assert relative_rms(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0
    zeros = torch.zeros(5, dtype=DOUBLE)
    assert relative_rms(zeros, zeros) == 0.0
    assert relative_rms(zeros + 1e-30, zeros) == math.inf
    assert relative_rms(zeros + 1e-9, zeros, floor=1e-2) == pytest.approx(1e-7)


def with_one(value):
    x = REFERENCE.clone()
    x[3, 4] = value
    return x


FAR = REFERENCE[3, 4] + 2.1 * (YARDSTICK - REFERENCE).abs().max()
# What is compared, in which way, and what the failure says.
REFUSED = [
    *((with_one(bad).to(dtype), {}, "error inf")
      for bad in (math.nan, math.inf) for dtype in (DOUBLE, FULL)),
    *((with_one(bad).bfloat16(), {"yardstick": YARDSTICK, "stress": stress}, "error inf")
      for bad in (math.nan, math.inf) for stress in (False, True)),
    (REFERENCE, {"reference": REFERENCE / 0}, "reference itself"),
    (REFERENCE / 0, {"yardstick": REFERENCE / 0, "dtype": BRAIN}, "yardstick itself"),
    (REFERENCE[:1], {}, "against"), (0 * REFERENCE, {}, "error"),
    # The largest error has a bar of its own, and float32 no excuse in a poor yardstick.
    (with_one(FAR), {"yardstick": YARDSTICK, "dtype": BRAIN}, "largest"),
    (REFERENCE + 1e-5 * ERROR, {"yardstick": YARDSTICK, "dtype": FULL}, "error"),
]  # fmt: skip


def compare(x, reference=REFERENCE, yardstick=None, **options):
    if yardstick is None:
        assert_close(x, reference, **options)
    else:
        assert_close_to_yardstick(x, reference, yardstick, **options)


@pytest.mark.parametrize(("x", "options", "says"), REFUSED)
def test_refused(x, options, says):
    with pytest.raises(AssertionError, match=says):
        compare(x, **options)


# What is allowed, and at how large an error: one in the direction of the yardstick's.
BARS = [
    *(({"dtype": dtype, "gradient": gradient}, bar * (5 if gradient else 1))
      for dtype, bar in ((DOUBLE, 1e-12), (FULL, 1e-6)) for gradient in (False, True)),
    *(({"dtype": BRAIN, "yardstick": YARDSTICK} | options, factor * 1e-3)
      for options, factor in (({}, 1.1), ({"gradient": True}, 1.5), ({"stress": True}, 2.5))),
    ({"dtype": FULL, "yardstick": YARDSTICK, "stress": True}, 2.5e-3),
]  # fmt: skip


@pytest.mark.parametrize(("options", "bar"), BARS)
def test_bars(options, bar):
    compare(REFERENCE + 0.99 * bar * ERROR, name="grad", **options)
    with pytest.raises(AssertionError, match="grad"):
        compare(REFERENCE + 1.01 * bar * ERROR, name="grad", **options)
