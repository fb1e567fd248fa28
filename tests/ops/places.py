"""Where an implementation is held to the definition: PyTorch, Triton's interpreter, a GPU."""

from typing import NamedTuple

import pytest
import torch

from kernels.interpreted import interpreted
from oracle import Case, on


class Place(NamedTuple):
    """An implementation on a device, and the dtype in which its numbers are exact."""

    impl: str
    device: str = "cpu"
    dtype: torch.dtype = torch.float64

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernels, which takes long."""
        return (self.impl, self.device) == ("triton", "cpu")

    def put(self, case: Case) -> Case:
        """The call there."""
        return on(self.device, case.to(self.dtype))


INTERPRETED = pytest.param(Place("triton", "cpu", torch.float32), id="triton", marks=interpreted)
IN_PYTORCH = [pytest.param(Place(impl), id=impl) for impl in ("torch", "reference")]
ON_CPU = [INTERPRETED, *IN_PYTORCH]
ON_GPU = [
    pytest.param(Place(impl, "cuda", torch.float32), id=f"{impl}, cuda", marks=pytest.mark.gpu)
    for impl in ("triton", "torch")
]
