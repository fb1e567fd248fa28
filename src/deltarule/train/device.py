"""The device of a run, by its name."""

import torch
from torch import Tensor

from deltarule.errors import reason


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Send a tensor from the CPU; a GPU takes it in turn, without a wait for what is before it."""
    if device.type != "cuda":
        return x.to(device)
    # Only what is pinned can be sent on its own, and only whole blocks of it.
    return x.contiguous().pin_memory().to(device, non_blocking=True)


def tokens_at_once(device: torch.device) -> int:
    """How many a model reads at a time when it is measured: a GPU would wait for the host."""
    return 2**17 if device.type == "cuda" else 2**15


def choose_device(name: str) -> torch.device:
    """The device of a name; "auto" is a GPU if PyTorch sees one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: give auto, cpu, cuda, cuda:1 or mps") from None
    try:
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # The first sentence: a build for CUDA goes on to say how to install a driver.
        why = reason(error).partition(". ")[0]
        raise ValueError(f"--device {name}: not available here ({why}); try cpu") from None
    return device
