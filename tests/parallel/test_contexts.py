"""One sequence, or one row of documents, over processes: what one process computes."""

import pytest
from processes import Processes

from deltarule.nn import MIXERS

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


# What looks back in each way: convolution, token shift, the token before, a running maximum, a
# sum of weights, positions, elementwise states, two sums, keys and values.
KINDS = [
    "gated_deltanet", "rwkv6", "rwkv7", "mlstm", "abc", "retnet", "longhorn_released", "mesa",
    "attention", "sliding_window",
]  # fmt: skip
NOT_LINEAR = ["ttt_linear", "ttt_mlp", "titans_linear", "titans_mlp"]


def check_model(processes: Processes, mixer: str, exchange: str, packed: bool, heads: int) -> None:
    options = {"mixer": mixer, "exchange": exchange, "packed": packed, "heads": heads}
    for errors in processes("whole_models.context_model", **options):
        assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mixer", KINDS)
def test_models_over_two(two: Processes, mixer: str, packed: bool) -> None:
    check_model(two, mixer, "gather", packed, 1)


def test_layers_that_are_not_linear_name_themselves(two: Processes) -> None:
    for mixer in NOT_LINEAR:
        for message in two("whole_models.refused", mixer=mixer):
            assert f"context must be None for {mixer}" in message


@pytest.mark.distributed
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("exchange", ["gather", "scan"])
@pytest.mark.parametrize("mixer", [name for name in MIXERS if name not in NOT_LINEAR])
def test_models_over_four(
    four: Processes, mixer: str, exchange: str, packed: bool, heads: int
) -> None:
    check_model(four, mixer, exchange, packed, heads)
