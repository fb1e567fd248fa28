"""Whether the maps beside the recurrence run as kernels or in PyTorch's own operations."""

from torch import Tensor

from deltarule.ops.dispatch import warn_slow


def kernel_runs(x: Tensor, why_not: str | None) -> bool:
    """Whether a fused map of x runs its kernel; a GPU is told once of each reason why not."""
    if why_not is not None and x.is_cuda:
        warn_slow("torch", why_not)
    return why_not is None
