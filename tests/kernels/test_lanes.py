"""The schedule of packed sequences: complete, without overlap, at most twice the best in length."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from deltarule import pack
from deltarule.ops import mini_batches

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any), st.integers(1, 8))
def test_every_sequence_has_its_own_place(lengths, size):
    plan = mini_batches.make_lanes(pack(lengths), None, sum(lengths), size, CPU)
    for n, length in enumerate(lengths):
        needed = -(-length // size)
        mine = plan.owner == n
        assert mine.sum() == needed
        first = int(plan.start[n])
        assert mine[first : first + needed, plan.lane[n]].all()
    longest = max(-(-length // size) for length in lengths)
    assert plan.owner.shape[0] <= 2 * longest
