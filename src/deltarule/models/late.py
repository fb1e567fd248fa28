"""Numbers on their way from a GPU, for which the host waits only once it reads them."""

from typing import Any

import torch
from torch import Tensor


class Late:
    """A copy of a tensor on the host, begun now and complete when it is read.

    The tensor may change meanwhile.
    """

    def __init__(self, x: Tensor) -> None:
        self.sent: torch.cuda.Event | None = None
        if not x.is_cuda:
            self.copy = x.clone()
            return
        self.copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        self.copy.copy_(x, non_blocking=True)
        self.sent = torch.cuda.Event()
        self.sent.record(torch.cuda.current_stream(x.device))

    def tolist(self) -> list[Any]:
        if self.sent is not None:
            self.sent.synchronize()
        return self.copy.tolist()
