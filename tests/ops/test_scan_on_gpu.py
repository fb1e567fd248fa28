"""`selective_scan` and `two_memories` on a CUDA device, against their definitions in float64."""

import pytest
import torch

from deltarule import pack, selective_scan
from ops import test_selective_scan as scan
from ops import test_two_memories as memories
from tolerance import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:deltarule runs impl='torch' on a CUDA device"),
]


@pytest.mark.parametrize("lengths", [None, scan.LENGTHS])
@pytest.mark.parametrize("form", scan.FORMS)
def test_scan(form, lengths):
    tensors = scan.make(form, tokens=300, lengths=lengths)
    leaves = {n: x.float().cuda().requires_grad_() for n, x in tensors.items()}
    exact = {n: x.float().double().requires_grad_() for n, x in tensors.items()}
    found, expected = scan.run(leaves, "auto", lengths), scan.run(exact, "reference", lengths)
    assert_close(found.o, expected.o, dtype=torch.float32)
    assert_close(found.final_state, expected.final_state, dtype=torch.float32)
    for out in (found, expected):
        (out.o.square().sum() + out.final_state.square().sum()).backward()
    for name, leaf in leaves.items():
        assert_close(leaf.grad, exact[name].grad, gradient=True, dtype=torch.float32, name=name)


def test_scan_of_a_layer_of_the_papers_size():
    """Mamba at 1536 value channels, 2048 tokens: finite, and within float32 of its definition."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2048, 1, 16).unbind()
    v, delta = torch.randn(1, 2048, 1, 1536), torch.rand(1, 2048, 1, 1536) * 0.1
    rates = -torch.arange(1.0, 17).expand(1, 1536, 16)
    inputs = (q, k, delta * v)
    out = selective_scan(*(x.cuda() for x in inputs), delta=delta.cuda(), A=rates.cuda())
    exact = selective_scan(*(x.double() for x in inputs), delta=delta.double(), A=rates.double())
    assert_close(out.o, exact.o, dtype=torch.float32)


@pytest.mark.parametrize("lengths", [None, (30, 0, 40)])
def test_memories(lengths):
    x = memories.make() if lengths is None else memories.make(1, 3)
    offsets = None if lengths is None else pack(lengths)
    rounded = {name: value.float() for name, value in x.items()}
    found = memories.run({n: y.cuda() for n, y in rounded.items()}, cu_seqlens=offsets)
    expected = memories.run({n: y.double() for n, y in rounded.items()}, cu_seqlens=offsets)
    for here, there in zip(found, expected, strict=True):
        assert_close(here, there, dtype=torch.float32)
