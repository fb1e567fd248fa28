"""What tests of operators share: where they run at all."""

import pytest
import torch


@pytest.fixture(scope="session")
def hopper() -> None:
    """Skips what is compiled for an H100 or H200, where there is neither."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the fused kernels are written for sm_90")
