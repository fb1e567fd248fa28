"""The device of a run, by its name."""

import torch


def choose_device(name: str) -> torch.device:
    """The device of a name; "auto" is a GPU if PyTorch sees one, else the CPU.

    Raises:
        ValueError: There is no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name}: not available here ({reason}); try cpu") from None
    return device
