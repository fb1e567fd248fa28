"""`titans` against arXiv 2501.00663, one head at a time."""

import pytest
import torch
import torch.nn.functional as F

from deltarule import TitansState, delta_rule, titans
from ops.memories import DOUBLE, HV, H, K, draw, make
from tolerance import relative_rms


def network(maps, x):
    for index, M in enumerate(maps):
        x = M @ (F.gelu(x, approximate="tanh") if index else x)
    return x


def gradient(maps, k, v):
    leaves = [M.clone().requires_grad_() for M in maps]
    return torch.autograd.grad((network(leaves, k) - v).square().sum(), leaves)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("maps", [1, 2])
@pytest.mark.parametrize("size", [1, 8])
def test_equals_the_papers_recurrence(maps, size, impl):
    """Eq. 9, 10 and 13 to 15; with mini-batches, gradients at the memory before them."""
    case = make("titans", maps, batch=2, tokens=27, size=size, begun=False)
    x, out = case.tensors, case.run(impl)
    for row, head in [(0, 0), (1, 3)]:
        M = [x[f"weights_{i + 1}"][row, head] for i in range(maps)]
        S, outputs = [torch.zeros_like(m) for m in M], []
        for t in range(27):
            q, k = (x[name][row, t, head * H // HV] for name in "qk")
            theta, eta = (x[name][row, t, head] for name in ("beta", "momentum"))
            alpha = 1 - x["log_decay"][row, t, head].exp()
            before = M if t % size == 0 else before
            surprise = gradient(before, k, x["v"][row, t, head])
            S = [eta * s - theta * g for s, g in zip(S, surprise, strict=True)]
            M = [(1 - alpha) * m + s for m, s in zip(M, S, strict=True)]
            outputs.append(network(M, q))
        assert relative_rms(out.o[row, :, head], torch.stack(outputs)) <= 1e-12
        for found, wanted in zip(out.final_state.weights, M, strict=True):
            assert relative_rms(found[row, head], wanted) <= 1e-12
        for found, wanted in zip(out.final_state.momentum, S, strict=True):
            assert relative_rms(found[row, head], wanted) <= 1e-12


def test_linear_memory_is_the_stated_gradient_step():
    """M_t = a M - theta d|M k - v|^2/dM + eta S, and d|M k - v|^2/dM = 2 (M k - v) k^T."""
    case = make("titans", 1, batch=1, tokens=1, size=1, begun=False)
    S = draw(1, HV, K, K)
    x, out = case.tensors, case.changed(summed_1=S).run()
    for head in range(HV):
        M, k, v = x["weights_1"][0, head], x["k"][0, 0, head * H // HV], x["v"][0, 0, head]
        (by_autograd,) = gradient([M], k, v)
        assert (by_autograd - 2 * torch.outer(M @ k - v, k)).abs().max() <= 1e-12
        theta, eta = x["beta"][0, 0, head], x["momentum"][0, 0, head]
        expected = x["log_decay"][0, 0, head].exp() * M - theta * by_autograd + eta * S[0, head]
        assert (out.final_state.weights[0][0, head] - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("decayed", [False, True])
def test_without_momentum_it_is_the_delta_rule(decayed):
    """Mini-batches of one token: DeltaNet with beta = 2 theta, the gradient at the old state."""
    q, k, v = F.normalize(draw(3, 2, 30, HV, K), dim=-1).unbind()
    theta = 0.5 * torch.rand(2, 30, HV, dtype=DOUBLE)
    log_decay = torch.zeros(2, 30, HV, dtype=DOUBLE)
    start = TitansState.start((torch.zeros(HV, K, K, dtype=DOUBLE),), 2)
    if decayed:
        # A decay after a write of nothing is a decay before the next write.
        log_decay[:, 9], theta[:, 9] = -0.7, 0
    out = titans(q, k, v, beta=theta, log_decay=log_decay, mini_batch=1, initial_state=start)
    expected = delta_rule(q, k, v, beta=2 * theta, log_decay=log_decay, scale=1.0)
    assert relative_rms(out.o, expected.o) <= 1e-12
    assert relative_rms(out.final_state.weights[0], expected.final_state) <= 1e-12


def test_gates_left_out_are_neutral():
    case = make("titans", 2)
    x = case.tensors
    zeros = torch.zeros_like(x["beta"])
    plain = case.changed(momentum=None, log_decay=None).run()
    spelled = case.changed(momentum=zeros, log_decay=zeros).run()
    assert torch.equal(plain.o, spelled.o)
    constant = -torch.rand(HV, dtype=DOUBLE)
    each = case.changed(log_decay=constant.expand(x["beta"].shape)).run()
    assert torch.equal(case.changed(log_decay=constant).run().o, each.o)


def test_the_anchor_moves_with_full_mini_batches_only():
    case = make("titans", 1, batch=1, tokens=11, size=4, begun=False)
    state = case.run().final_state
    eight = case.part(slice(8)).run().final_state
    assert state.position.tolist() == [3]
    assert relative_rms(state.anchor[0], eight.weights[0]) <= 1e-12
    assert torch.equal(eight.anchor[0], eight.weights[0])
