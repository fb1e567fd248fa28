"""What tests of operators share: where they run at all."""

import pytest
import torch

from deltarule.ops.delta_rule.step import STEPS
from deltarule.ops.dispatch import always
from ops.places import ON_CPU, ON_GPU, Place


@pytest.fixture(scope="session")
def hopper() -> None:
    """Skips what is compiled for an H100 or H200, where there is neither."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the fused kernels are written for sm_90")


@pytest.fixture(params=[*ON_CPU, *ON_GPU])
def place(request, monkeypatch) -> Place:
    """Where a step runs; Triton's interpreter takes its kernel for one that a GPU runs."""
    if request.param.is_interpreted:
        monkeypatch.setitem(STEPS, "triton", STEPS["triton"]._replace(why_not=always))
    return request.param
