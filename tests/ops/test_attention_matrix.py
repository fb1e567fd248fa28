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


def test_an_entry_is_the_product_of_the_transitions() -> None:
    case = make_case("head", "tied", batch=1, tokens=6, heads=1, value_heads=1)
    q, k, beta, log_decay = (case.tensors[n][0, :, 0] for n in ("q", "k", "beta", "log_decay"))
    matrix = attention_matrix(*(case.tensors[n] for n in "qk"), beta=case.tensors["beta"],
                              log_decay=case.tensors["log_decay"], scale=1.0)  # fmt: skip
    for i in range(6):
        for j in range(i + 1):
            row = beta[j] * k[j]
            for s in range(j + 1, i + 1):
                row = log_decay[s].exp() * row
                row = row - beta[s] * (row @ k[s]) * k[s]
            torch.testing.assert_close(matrix[0, 0, i, j], row @ q[i])


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
