"""How far a result may be from the truth: one measure and one set of bars for every test.

error(x) = sqrt(sum (x - reference)^2 / sum reference^2)        reference in float64
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Bars by the dtype of the inputs, where full precision leaves nothing to compare with.
FORWARD = {torch.float64: 1e-12, torch.float32: 1e-6}
GRADIENT = {torch.float64: 5e-12, torch.float32: 5e-6}

# For bfloat16 and float16: multiples of the yardstick's own error.
YARDSTICK_FORWARD = 1.1
YARDSTICK_GRADIENT = 1.5
YARDSTICK_STRESS = 2.5
YARDSTICK_LARGEST = 2.0


def relative_rms(x: Tensor, reference: Tensor, *, floor: float = 0.0) -> float:
    """Root mean square of x - reference, relative to that of the reference.

    A value that is not finite where the reference is counts as an infinite error, and so does
    anything but zero against a reference of zeros. Where the exact answer is zero by cancellation,
    `floor` is the root mean square of what cancelled, and bounds the denominator from below.
    """
    return _relative(x, reference, floor, lambda y: y.square().mean().sqrt().item())


def relative_largest(x: Tensor, reference: Tensor, *, floor: float = 0.0) -> float:
    """Largest |x - reference| relative to the largest |reference|; otherwise as `relative_rms`."""
    return _relative(x, reference, floor, lambda y: y.abs().max().item())


def assert_close(
    x: Tensor,
    reference: Tensor,
    *,
    dtype: torch.dtype | None = None,
    gradient: bool = False,
    name: str = "result",
    floor: float = 0.0,
) -> None:
    """Check a float32 or float64 computation: 1e-6 and 5e-6 (gradients), or 1e-12 and 5e-12.

    `dtype` is that of the inputs; None means that of x.
    """
    bar = (GRADIENT if gradient else FORWARD)[dtype or x.dtype]
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
    """Check a computation against the error that `reference/chunked.py` makes in the same dtype.

    Args:
        x: What is checked.
        reference: The same from float64 arithmetic on the same rounded inputs.
        yardstick: The same from `reference/chunked.py` with its operands rounded to `dtype`.
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
    factor = YARDSTICK_GRADIENT if gradient else YARDSTICK_FORWARD
    factor = YARDSTICK_STRESS if stress else factor
    full_precision = (GRADIENT if gradient else FORWARD).get(dtype, 0.0)
    _check(name, "error", error, max(factor * own, full_precision))
    largest = max(YARDSTICK_LARGEST, factor) * relative_largest(yardstick, reference, floor=floor)
    error = relative_largest(x, reference, floor=floor)
    _check(name, "largest error", error, max(largest, full_precision))


def _relative(x: Tensor, reference: Tensor, floor: float, norm: Callable[[Tensor], float]) -> float:
    assert x.shape == reference.shape, f"{list(x.shape)} against {list(reference.shape)}"
    if x.numel() == 0:
        return 0.0
    reference = reference.detach().to("cpu", torch.float64)
    assert reference.isfinite().all(), "the reference itself is not finite"
    difference = x.detach().to("cpu", torch.float64) - reference
    if not difference.isfinite().all():
        return math.inf
    error, size = norm(difference), max(norm(reference), floor)
    if error == 0.0:
        return 0.0
    return error / size if size > 0.0 else math.inf


def _check(name: str, measure: str, error: float, bar: float) -> None:
    assert error <= bar, f"{name}: {measure} {error:.2e} is over {bar:.2e}"
