import math

import pytest
import torch

from tolerance import assert_close, assert_close_to_yardstick, relative_largest, relative_rms


@pytest.fixture
def reference():
    return torch.randn(64, 32, dtype=torch.float64)


def shifted(reference, error):
    """A result whose relative RMS is `error`."""
    direction = torch.randn_like(reference)
    direction *= reference.norm() / direction.norm()
    return reference + error * direction


def test_measure(reference):
    assert relative_rms(shifted(reference, 1e-3), reference) == pytest.approx(1e-3)
    assert relative_rms(reference.float(), reference) < 1e-7
    assert relative_largest(1.25 * reference, reference) == pytest.approx(0.25)
    assert relative_rms(0 * reference, reference) == 1.0
    assert relative_rms(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0
    zeros = torch.zeros(5, dtype=torch.float64)
    assert relative_rms(zeros, zeros) == 0.0
    assert relative_rms(zeros + 1e-30, zeros) == math.inf
    assert relative_rms(zeros + 1e-9, zeros, floor=1e-2) == pytest.approx(1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_value_that_is_not_finite_is_an_infinite_error(reference, bad):
    x = reference.clone()
    x[3, 4] = bad
    assert relative_rms(x, reference) == math.inf
    for dtype in (torch.float64, torch.float32):
        with pytest.raises(AssertionError, match="error inf"):
            assert_close(x.to(dtype), reference)
    with pytest.raises(AssertionError, match="error inf"):
        assert_close_to_yardstick(x.bfloat16(), reference, reference.bfloat16())
    # The yardstick does not excuse it.
    with pytest.raises(AssertionError):
        assert_close_to_yardstick(x.bfloat16(), reference, reference.bfloat16(), stress=True)


def test_what_cannot_be_compared_is_refused(reference):
    with pytest.raises(AssertionError, match="reference itself"):
        relative_rms(reference, reference / 0)
    with pytest.raises(AssertionError, match="yardstick itself"):
        assert_close_to_yardstick(reference / 0, reference, reference / 0, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="against"):
        relative_rms(reference[:1], reference)
    with pytest.raises(AssertionError):
        assert_close(0 * reference, reference)


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("gradient", "times"), [(False, 1), (True, 5)])
def test_bars_of_full_precision(reference, dtype, bar, gradient, times):
    options = {"dtype": dtype, "gradient": gradient, "name": "grad"}
    assert_close(shifted(reference, 0.9 * times * bar), reference, **options)
    with pytest.raises(AssertionError, match="grad"):
        assert_close(shifted(reference, 1.1 * times * bar), reference, **options)


@pytest.mark.parametrize(
    ("options", "factor"), [({}, 1.1), ({"gradient": True}, 1.5), ({"stress": True}, 2.5)]
)
def test_bars_against_the_yardstick(reference, options, factor):
    yardstick = shifted(reference, 1e-3)
    # In one direction with the yardstick, so that the largest error stays within its own bar.
    error = yardstick - reference
    options |= {"dtype": torch.bfloat16}
    assert_close_to_yardstick(reference + 0.99 * factor * error, reference, yardstick, **options)
    with pytest.raises(AssertionError):
        assert_close_to_yardstick(
            reference + 1.01 * factor * error, reference, yardstick, **options
        )


def test_largest_error_has_a_bar_of_its_own(reference):
    yardstick = shifted(reference, 1e-3)
    x = reference.clone()
    x[0, 0] += 2.1 * (yardstick - reference).abs().max()
    assert relative_rms(x, reference) < relative_rms(yardstick, reference)
    with pytest.raises(AssertionError, match="largest"):
        assert_close_to_yardstick(x, reference, yardstick, dtype=torch.bfloat16)


def test_float32_is_not_excused_by_a_poor_yardstick(reference):
    x, yardstick = shifted(reference, 1e-5), shifted(reference, 1e-3)
    with pytest.raises(AssertionError):
        assert_close_to_yardstick(x, reference, yardstick, dtype=torch.float32)
    assert_close_to_yardstick(x, reference, yardstick, dtype=torch.float32, stress=True)
