"""Operators on the meta device and on fake tensors, which carry shapes and no numbers."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import deltarule

SIZES = 2, 9, 2, 4


def run(device):
    q, k, v = (torch.randn(SIZES, device=device, requires_grad=True) for _ in range(3))
    beta = torch.rand(SIZES[:3], device=device)
    o, state = deltarule.delta_rule(q, k, v, beta=beta, log_decay=-beta)
    o.sum().backward()
    assert o.shape == v.grad.shape == SIZES
    return state


def test_delta_rule_on_the_meta_device():
    assert run("meta").device.type == "meta"


def test_delta_rule_of_fake_tensors():
    with FakeTensorMode():
        assert run("cpu").shape == (2, 2, 4, 4)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_mesa_of_fake_tensors(impl):
    with FakeTensorMode():
        x = torch.randn(SIZES)
        output = deltarule.ops.mesa(
            x, x, x, beta=torch.rand(SIZES[:3]), log_decay=-torch.rand(SIZES[:3]),
            regularizer=torch.ones(2, 4), impl=impl,
        )  # fmt: skip
        assert output.o.shape == SIZES
