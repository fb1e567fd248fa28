"""One sequence, or one row of documents, over processes: what one process computes."""

import pytest
from processes import Processes

# Of float64: sums in another order, nothing else.
BAR = 1e-12


@pytest.mark.parametrize("exchange", ["gather", "scan"])
def test_operators_over_two(two: Processes, exchange: str) -> None:
    for cases in two("contexts.operator_cases", exchange=exchange, bounds=[0, 22, 53]):
        assert max(error for _, error in cases) < BAR, cases


@pytest.mark.distributed
@pytest.mark.parametrize("exchange", ["gather", "scan"])
@pytest.mark.parametrize("bounds", [None, [0, 1, 30, 31, 53]])
def test_operators_over_four(four: Processes, exchange: str, bounds: list[int] | None) -> None:
    for cases in four("contexts.operator_cases", exchange=exchange, bounds=bounds):
        assert max(error for _, error in cases) < BAR, cases
