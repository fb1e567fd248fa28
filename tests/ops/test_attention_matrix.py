"""The matrix of an operator is the matrix that the recurrence multiplies its values by."""

import pytest
import torch

from deltarule import attention_matrix
from oracle import DECAYS, make_case
from tolerance import assert_close


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(
    ("erase", "n_steps", "normalize"),
    [("none", 1, False), ("tied", 1, False), ("tied", 3, False), ("tied", 1, True)],
)
def test_times_the_values_it_equals_the_recurrence(decay, erase, n_steps, normalize) -> None:
    case = make_case(decay, erase, tokens=70, n_steps=n_steps, normalize_qk=normalize)
    x, longer = case.tensors, 3 if normalize else 1
    case = case.changed(initial_state=None, q=longer * x["q"], k=longer * x["k"])
    x = case.tensors
    matrix = attention_matrix(
        x["q"], x["k"], beta=x["beta"], log_decay=x["log_decay"], n_steps=n_steps,
        normalize_qk=normalize,
    )  # fmt: skip
    heads = matrix.shape[1]
    values = x["v"] if heads == 4 else x["v"][:, :, :2]
    expected = case.changed(v=values).run("reference").o
    assert_close(torch.einsum("bhts,bshv->bthv", matrix, values), expected)
    future = torch.ones(70, 70).triu(1).bool().repeat_interleave(n_steps, 1)
    assert (matrix[..., future] == 0).all()


def test_scale_is_that_of_the_operator() -> None:
    case = make_case("none", "none", tokens=5)
    q, k = case.tensors["q"], case.tensors["k"]
    default = attention_matrix(q, k, beta=None)
    torch.testing.assert_close(attention_matrix(q, k, beta=None, scale=1.0), default * 8**0.5)
