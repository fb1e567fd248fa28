"""The check of addresses notices a kernel that reads or writes beside its arguments."""

import pytest
import torch

from promised import promised

triton = promised("triton")
tl = triton.language

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter alone")


@triton.jit
def copy_kernel(x, y, first, size, N: tl.constexpr):
    o_n = first + tl.arange(0, N)
    tl.store(y + o_n, tl.load(x + o_n, mask=o_n < size), mask=o_n < size)


def test_addresses_inside_are_left_alone() -> None:
    x = torch.arange(5.0)
    y = torch.zeros(8)
    copy_kernel[(1,)](x, y[:5], 0, 5, N=8)
    assert y.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]


@pytest.mark.parametrize(
    ("sizes", "first", "does"), [((5, 8), 0, "reads"), ((8, 5), 0, "writes"), ((8, 8), -1, "reads")]
)
def test_addresses_outside_are_refused(sizes, first, does) -> None:
    # Both lie in memory of their own, so that nothing else would notice.
    x, y = (torch.zeros(16)[4 : 4 + size] for size in sizes)
    with pytest.raises(Exception, match=f"copy_kernel {does} outside"):
        copy_kernel[(1,)](x, y, first, 6, N=8)
