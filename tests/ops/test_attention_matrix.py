"""The matrix of an operator is the matrix that the recurrence multiplies its values by."""

import pytest
import torch

from deltarule import attention_matrix
from oracle import DECAYS, make_case
from tolerance import assert_close


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("erase", "n_steps"), [("none", 1), ("tied", 1), ("tied", 3)])
def test_times_the_values_it_equals_the_recurrence(decay: str, erase: str, n_steps: int) -> None:
    case = make_case(decay, erase, tokens=70, n_steps=n_steps).changed(initial_state=None)
    x = case.tensors
    matrix = attention_matrix(
        x["q"], x["k"], beta=x["beta"], log_decay=x["log_decay"], n_steps=n_steps
    )
    heads = matrix.shape[1]
    values = x["v"] if heads == 4 else x["v"][:, :, :2]
    expected = case.changed(v=values).run("reference").o
    assert_close(torch.einsum("bhts,bshv->bthv", matrix, values), expected)
    future = torch.ones(70, 70).triu(1).bool().repeat_interleave(n_steps, 1)
    assert (matrix[..., future] == 0).all()


def test_unit_norm_is_that_of_the_operator() -> None:
    case = make_case("none", "tied", tokens=9, normalize_qk=True).changed(initial_state=None)
    x = case.tensors
    matrix = attention_matrix(2 * x["q"], 3 * x["k"], beta=x["beta"], normalize_qk=True)
    expected = case.changed(q=2 * x["q"], k=3 * x["k"]).run("reference").o
    assert_close(torch.einsum("bhts,bshv->bthv", matrix, x["v"]), expected)


def test_scale_is_that_of_the_operator() -> None:
    case = make_case("none", "none", tokens=5)
    q, k = case.tensors["q"], case.tensors["k"]
    default = attention_matrix(q, k, beta=None)
    torch.testing.assert_close(attention_matrix(q, k, beta=None, scale=1.0), default * 8**0.5)
