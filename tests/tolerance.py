"""How far a result may be from the truth: assertions on the measure and bars of the package.

error(x) = sqrt(sum (x - reference)^2 / sum reference^2)        reference in float64
"""

import math

import torch
from torch import Tensor

from deltarule.doctor import bars
from deltarule.doctor.bars import FORWARD, GRADIENT, growth, relative_largest, relative_rms

__all__ = [
    "assert_close", "assert_close_to_yardstick", "growth", "relative_largest", "relative_rms",
]  # fmt: skip


def assert_close(
    x: Tensor,
    reference: Tensor,
    *,
    dtype: torch.dtype | None = None,
    gradient: bool = False,
    name: str = "result",
    floor: float = 0.0,
    growth: float = 1.0,
) -> None:
    """Check a float32 or float64 computation: 1e-6 and 5e-6 (gradients), or 1e-12 and 5e-12.

    `dtype` is that of the inputs; None means that of x. `growth` is how far the call lets its
    roundings grow, `tolerance.growth(writes, K, beta, share)` where nothing decays.
    """
    dtype = dtype or x.dtype
    bar = max(GRADIENT[dtype] if gradient else 0.0, growth * FORWARD[dtype])
    _check(name, "error", relative_rms(x, reference, floor=floor), bar)


def assert_close_to_yardstick(
    x: Tensor,
    reference: Tensor,
    yardstick: Tensor,
    *,
    dtype: torch.dtype | None = None,
    gradient: bool = False,
    stress: bool = False,
    name: str = "result",
    floor: float = 0.0,
) -> None:
    """Check a computation against the error that `chunked.py` makes in the same dtype.

    Args:
        x: What is checked.
        reference: The same from float64 arithmetic on the same rounded inputs.
        yardstick: The same from `doctor/chunked.py` with its operands rounded to `dtype`.
        dtype: Of the inputs; None means that of x (a float32 state comes from bfloat16 inputs).
        gradient: Allow 1.5 times the yardstick's error instead of 1.1.
        stress: Correlated keys and beta > 1: allow 2.5 times.
        name: What the failure calls x.
        floor: As in `relative_rms`.
    """
    error = relative_rms(x, reference, floor=floor)
    own = relative_rms(yardstick, reference, floor=floor)
    assert own < math.inf, "the yardstick itself is not finite"
    dtype = dtype or x.dtype
    if dtype in FORWARD and not stress:
        assert_close(x, reference, dtype=dtype, gradient=gradient, name=name, floor=floor)
        return
    factor = bars.YARDSTICK_GRADIENT if gradient else bars.YARDSTICK_FORWARD
    factor = bars.YARDSTICK_STRESS if stress else factor
    # A state is summed in float32 whatever the inputs are, where the yardstick may round nothing.
    full = GRADIENT if gradient else FORWARD
    least = full.get(dtype, full[torch.float32])
    _check(name, "error", error, max(factor * own, least))
    most = max(bars.YARDSTICK_LARGEST, factor) * relative_largest(yardstick, reference, floor=floor)
    error = relative_largest(x, reference, floor=floor)
    _check(name, "largest error", error, max(most, bars.YARDSTICK_LARGEST * least))


def _check(name: str, measure: str, error: float, bar: float) -> None:
    assert error <= bar, f"{name}: {measure} {error:.2e} is over {bar:.2e}"
