"""`ttt` against the authors' formulas, one head and one mini-batch at a time."""

import pytest
import torch
import torch.nn.functional as F

from ops.memories import DOUBLE, HV, H, K, make
from tolerance import relative_rms


def layer_norm(z, weight, bias):
    return F.layer_norm(z, z.shape[-1:], weight, bias, 1e-6)


def by_hand(maps, q, k, v, rate, scale, weight, bias):
    """The authors' primal form, arXiv 2407.04620, algorithm in section 2.4 to 2.7, row vectors.

    eta[t, i] = scale_t rate_i. Target v - k through the norm, read-out q + LN(..).
    """
    maps = [(m[:, :-1].mT.clone(), m[:, -1].clone()) for m in maps]
    size, outputs = len(scale), []
    for start in range(0, len(q), size):
        window = slice(start, start + size)
        XQ, XK, XV, lr = q[window], k[window], v[window], rate[window]
        leaves = [tuple(x.clone().requires_grad_() for x in pair) for pair in maps]
        flat = [x for pair in leaves for x in pair]
        losses = [
            0.5 * (layer_norm(forward(leaves, x), weight, bias) - (y - x)).square().sum()
            for x, y in zip(XK, XV, strict=True)
        ]
        gradients = [torch.autograd.grad(loss, flat) for loss in losses]
        for t in range(len(XQ)):
            now = [
                x - sum(scale[t] * lr[i] * gradients[i][j] for i in range(t + 1))
                for j, x in enumerate(flat)
            ]
            pairs = list(zip(now[::2], now[1::2], strict=True))
            outputs.append(XQ[t] + layer_norm(forward(pairs, XQ[t]), weight, bias))
        maps = [tuple(x.detach() for x in pair) for pair in pairs]
    return torch.stack(outputs).detach(), maps


def forward(maps, x):
    for index, (weight, bias) in enumerate(maps):
        x = (F.gelu(x, approximate="tanh") if index else x) @ weight + bias
    return x


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("maps", [1, 2])
def test_equals_the_authors_primal_form(maps, impl):
    case = make("ttt", maps, batch=2, tokens=40, size=8, begun=False)
    x, out = case.tensors, case.run(impl)
    for row, head in [(0, 0), (1, 3)]:
        q, k = (x[name][row, :, head * H // HV] for name in "qk")
        weights = [x[f"weights_{i + 1}"][row, head] for i in range(maps)]
        expected, after = by_hand(
            weights, q, k, x["v"][row, :, head], x["beta"][row, :, head], x["step_scale"],
            x["norm_weight"][head], x["norm_bias"][head],
        )  # fmt: skip
        assert relative_rms(out.o[row, :, head], expected) <= 1e-12
        for found, (weight, bias) in zip(out.final_state.weights, after, strict=True):
            assert relative_rms(found[row, head, :, :-1], weight.mT) <= 1e-12
            assert relative_rms(found[row, head, :, -1], bias) <= 1e-12


@pytest.mark.parametrize("maps", [1, 2])
def test_a_mini_batch_is_one_gradient_step_of_its_loss(maps):
    """W_C = W_0 - step_scale_C d/dW sum_i beta_i |k_i + LN(W k_i) - v_i|^2 / 2 at W_0."""
    case = make("ttt", maps, batch=1, tokens=8, size=8, begun=False)
    x, out = case.tensors, case.run()
    for head in range(HV):
        weights = [x[f"weights_{i + 1}"][0, head].clone().requires_grad_() for i in range(maps)]
        pairs = [(w[:, :-1].mT, w[:, -1]) for w in weights]
        k, v = x["k"][0, :, head * H // HV], x["v"][0, :, head]
        fitted = k + layer_norm(forward(pairs, k), x["norm_weight"][head], x["norm_bias"][head])
        loss = 0.5 * (x["beta"][0, :, head] * (fitted - v).square().sum(-1)).sum()
        gradients = torch.autograd.grad(loss, weights)
        for found, w, g in zip(out.final_state.weights, weights, gradients, strict=True):
            assert (found[0, head] - (w - x["step_scale"][-1] * g)).abs().max() <= 1e-10
    assert out.final_state.position.tolist() == [0]
    assert all((summed == 0).all() for summed in out.final_state.gradients)


def test_an_open_mini_batch_waits_in_the_state():
    case = make("ttt", 1, batch=1, tokens=3, size=8, begun=False)
    state = case.run().final_state
    assert torch.equal(state.weights[0], case.tensors["weights_1"])
    assert state.position.tolist() == [3]
    assert (state.gradients[0] != 0).all()


def test_a_learning_rate_of_zero_reads_the_first_network():
    case = make("ttt", 1, begun=False)
    x = case.tensors
    out = case.changed(beta=torch.zeros_like(x["beta"])).run()
    q = x["q"].repeat_interleave(HV // H, 2)
    z = torch.einsum("bhvk,bthk->bthv", x["weights_1"][..., :-1], q)
    z = z + x["weights_1"][:, None, ..., -1]
    mean, variance = z.mean(-1, keepdim=True), z.var(-1, unbiased=False, keepdim=True)
    expected = q + x["norm_weight"] * (z - mean) / (variance + 1e-6).sqrt() + x["norm_bias"]
    assert relative_rms(out.o, expected) <= 1e-12
    assert out.o.dtype == DOUBLE
    assert out.o.shape[-1] == K
