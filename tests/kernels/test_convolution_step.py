"""The convolutions of a few tokens in one kernel: the bits of the convolution of a whole call."""

import pytest
import torch

from deltarule.nn import ShortConv
from deltarule.nn.short_conv import step_in_place
from deltarule.ops.fused import short_conv
from deltarule.ops.runtime.chained import UNREAD, read_early
from promised import promised

promised("triton")


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_streams_are_convolved_as_each_alone(tokens, dtype, device):
    sizes, batch = (130, 24, 256), 2
    modules = [ShortConv(size, 4, activated=size > 24).to(device) for size in sizes]
    packed = torch.randn(batch, tokens, sum(sizes), device=device).to(dtype)
    streams = packed.split(sizes, dim=-1)
    histories = [torch.randn(batch, 3, size, device=device).to(dtype) for size in sizes]
    expected = [
        short_conv.short_conv(x, m.weight, history.clone(), None, None, None, m.activated)
        for m, x, history in zip(modules, streams, histories, strict=True)
    ]
    with torch.no_grad():
        found = step_in_place(modules, streams, histories)
    for y, history, (y_alone, history_alone) in zip(found, histories, expected, strict=True):
        assert torch.equal(y, y_alone)
        assert torch.equal(history, history_alone)


def test_a_chain_reads_a_state_early_once():
    mine, other = torch.zeros(2, 3), torch.zeros(3)
    assert not read_early(mine)
    token = UNREAD.set({mine.data_ptr()})
    assert not read_early(mine, other)
    assert read_early(mine)
    assert not read_early(mine)
    UNREAD.reset(token)
