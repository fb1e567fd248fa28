"""What `selective_scan` has beyond the contract: windows, resets, precision, memory, equation."""

import pytest
import torch

from deltarule import selective_scan
from deltarule.ops.selective_scan import torch as scan_layout
from nodes import kept
from ops.contract import HV, OPERATORS, V, check
from tolerance import assert_close

LENGTHS = (70, 0, 1, 130, 5)


@pytest.mark.parametrize("elements", [1, 2**14, 2**30])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_windows_of_any_size_agree(elements, lengths, monkeypatch):
    monkeypatch.setattr(scan_layout, "window_elements", lambda device: elements)
    check(OPERATORS["all"], OPERATORS["all"].draw(tokens=150, lengths=lengths))


def test_resets_leave_nothing_and_are_differentiable():
    operator = OPERATORS["dfw"]
    x = operator.draw(tokens=150)
    x["log_decay"][:, 64::29] = -torch.inf
    x["value_log_decay"][:, 33] = -1e6
    check(operator, x)
    changed = x | {"v": x["v"].clone()}
    changed["v"][:, :64] += 1
    before, after = (operator.run(**y, impl="torch")[0][:, 64:] for y in (x, changed))
    assert torch.equal(before, after)


def test_memory_stays_below_that_of_all_states():
    """A saved state for each chunk of 64 tokens, not for each token."""
    x = OPERATORS["mamba"].draw(tokens=1024)
    size = HV, V, x["A"].shape[-1]
    del x["initial_state"]
    leaves = {name: y.requires_grad_() for name, y in x.items()}
    with kept() as tensors:
        OPERATORS["mamba"].run(**leaves, impl="torch")
    state = x["A"].numel()
    assert sum(y.numel() for y in tensors if y.shape[1:] == size) == 2 * 1024 // 64 * state
    assert max(y.numel() for y in tensors) < 2 * 1024 * state // 2


def test_gradients_are_laid_out_as_a_compiler_is_told():
    """Whatever the strides of v: compiled code views its gradient."""
    x = OPERATORS["mamba"].draw(tokens=6)
    v = x["v"].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    o = OPERATORS["mamba"].run(**(x | {"v": v}), impl="torch")[0]
    (found,) = torch.autograd.grad(o.sum(), v)
    assert found.is_contiguous()


def test_the_definition_by_hand():
    """Eq. by eq. for one token of one head, with numbers small enough to check by eye."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    out = selective_scan(
        3 * one, 2 * one, 5 * one, delta=one, A=-one[0], value_log_decay=-one, log_decay=-one,
        beta=0.1 * one, initial_state=7 * one, scale=1.0, impl="reference",
    )  # fmt: skip
    state = 7 * torch.tensor(-3.0, dtype=torch.float64).exp() * (1 - 0.1 * 4) + 0.1 * 5 * 2
    assert_close(out.final_state, state.view(1, 1, 1, 1))
    assert_close(out.o, 3 * state.view(1, 1, 1, 1))
