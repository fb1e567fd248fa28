"""How far a result may be from the truth: one measure and one set of bars for tests and doctor.

error(x) = sqrt(sum (x - reference)^2 / sum reference^2)        reference in float64
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Bars by the dtype of the inputs, where full precision leaves nothing to compare with.
FORWARD = {torch.float64: 1e-12, torch.float32: 1e-6}
GRADIENT = {torch.float64: 5e-12, torch.float32: 5e-6}


def growth(writes: int, key_size: int, beta: float = 2.0, share: float | None = None) -> float:
    """How far roundings grow where nothing decays: sqrt(s min(n, K / (beta (2 - beta)))), or 1.

    Beyond beta = 1 a write overshoots, and forgets less: of the squared state along its key it
    keeps (1 - beta)^2, and at beta = 2 all of it. The roundings of the last K / (beta (2 - beta))
    of n writes add up as a random walk, most in the direction that keys have most in common: s is
    their share of the squared length there, 1 / K if they spread evenly.
    """
    forgotten = max(beta, 1.0) * (2 - max(beta, 1.0))
    kept = min(writes, key_size / forgotten) if forgotten > 0 else writes
    return math.sqrt(max(1.0, kept * (1 / key_size if share is None else share)))


# For bfloat16 and float16: multiples of the error of `chunked.py` in the same dtype.
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
