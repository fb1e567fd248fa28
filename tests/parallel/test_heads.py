"""Heads, channels and vocabulary over processes: what one process computes."""

import pytest
from processes import Processes

from deltarule.nn import MIXERS

# A layer of each kind: grouped heads, token shift, products and norms over heads, constants, steps.
KINDS = [
    "gated_deltanet",
    "rwkv7",
    "mamba1",
    "mamba2",
    "retnet",
    "gated_delta_product",
    "attention",
]
BAR = 1e-10


def check(processes: Processes, mixer: str, tensor: int) -> None:
    for errors in processes("whole_models.heads_and_shards", mixer=mixer, tensor=tensor):
        assert max(errors.values()) < BAR, errors


@pytest.mark.parametrize("mixer", KINDS)
def test_heads_over_two(two: Processes, mixer: str) -> None:
    check(two, mixer, 2)


@pytest.mark.parametrize("mixer", ["gated_deltanet", "rwkv7"])
def test_shards_over_two(two: Processes, mixer: str) -> None:
    check(two, mixer, 1)


@pytest.mark.distributed
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("mixer", list(MIXERS))
def test_four(four: Processes, mixer: str, tensor: int) -> None:
    check(four, mixer, tensor)
