"""Autocast switched off around arithmetic whose dtypes are chosen by hand."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Leave dtypes alone within; meta tensors, which carry no numbers, have no autocast at all."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
