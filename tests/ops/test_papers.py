"""Operators beside the loops of their papers, transcribed on their own."""

from functools import partial

import pytest
import torch

from deltarule import delta_rule, long_convolution, selective_scan, slstm, two_memories
from ops import memories
from ops.contract import HV, OPERATORS, H, K, V, draw, slots
from oracles import decaying_fast_weights as dfw
from oracles import delta_scan, hyena, mamba, titans, ttt
from oracles import slstm as cell
from tolerance import assert_close, relative_rms

T = 13
DOUBLE = torch.float64


@pytest.mark.parametrize("carried", [False, True])
def test_the_delta_rule_by_the_parallel_scan_of_its_paper(carried):
    q, k, v, beta = draw(T, K), draw(T, K) / 2, draw(T, V), torch.rand(T, dtype=torch.float64)
    start = draw(V, K) if carried else None
    expected, last = delta_scan.scan(q, k, v, beta, start)
    rows, state = (x[None, :, None] for x in (q, k, v)), start[None, None] if carried else None
    out = delta_rule(*rows, beta=beta[None, :, None], scale=1.0, initial_state=state)
    assert relative_rms(out.o[0, :, 0], expected) <= 1e-12
    assert relative_rms(out.final_state[0, 0], last) <= 1e-12


def test_a_signed_state_by_its_oracle():
    """arXiv 2411.12537, section 5: the factor is 2 exp(..) - 1, and the input stays as it is."""
    given = OPERATORS["mamba"].draw(tokens=20)
    expected, _ = mamba.recurrence(
        given["q"][0, :, 0], given["k"][0, :, 0], given["v"][0, :, 0], given["delta"][0, :, 0],
        (-given["A"][0]).log(), torch.zeros_like(given["A"][0, :, 0]), signed=True,
    )  # fmt: skip
    decays = {"delta": given["delta"], "A": given["A"], "signed": True}
    for impl in ("torch", "reference", "auto"):
        v = given["v"] * given["delta"]
        out = selective_scan(given["q"], given["k"], v, **decays, scale=1.0, impl=impl)
        assert_close(out.o[0, :, 0], expected)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_decaying_fast_weights_are_two_masked_products(impl, scale):
    """Strong decays too: no quotient of their products is taken."""
    tokens = 150
    q, k = torch.randn(2, tokens, 6, dtype=torch.float64)
    v, state = torch.randn(tokens, 5).double(), torch.randn(5, 6).double()
    a, b = (scale * torch.nn.functional.logsigmoid(torch.randn_like(x)) for x in (k, v))
    given = {"log_decay": a[None, :, None], "value_log_decay": b[None, :, None]}
    x = (y[None, :, None] for y in (q, k, v))
    out = selective_scan(*x, **given, scale=1.0, initial_state=state[None, None], impl=impl)
    expected, final = dfw.recurrence(q, k, v, a.exp(), b.exp(), state)
    assert_close(out.o[0, :, 0], expected)
    assert_close(out.final_state[0, 0], final)
    x = (y[None, :, None] for y in (q, k, v))
    out = selective_scan(*x, **given, scale=1.0, impl=impl)
    assert_close(out.o[0, :, 0], dfw.masked_products(q, k, v, a.exp(), b.exp()))


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


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_hyena_as_its_authors_sum_it(impl):
    q, k, v, h = torch.randn(4, 12, 5, dtype=DOUBLE).unbind()
    d = torch.randn(5, dtype=DOUBLE)
    taps = h.T.clone()
    taps[:, 0] += d
    given = (x[None, :, :, None] for x in (q, k, v))
    q_, k_, v_ = given
    o = long_convolution(v_, taps, q=q_, k=k_, impl=impl).o[0, :, :, 0]
    assert relative_rms(o, hyena.hyena(q, k, v, h, d)) <= 1e-12


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_multi_head_hyena_as_its_authors_sum_it(impl):
    q, k = torch.randn(2, 12, 3, dtype=DOUBLE).unbind()
    v, h = torch.randn(12, 4, dtype=DOUBLE), torch.randn(12, dtype=DOUBLE)
    given = {"q": q[None, :, None], "k": k[None, :, None]}
    o = long_convolution(v[None, :, None], h[None], **given, impl=impl).o[0, :, 0]
    assert relative_rms(o, hyena.multi_head(q, k, v, h)) <= 1e-12


def test_slstm_as_the_paper_has_it():
    given = OPERATORS["slstm"].draw(1, 12)
    gates, recurrent = given["gates"], given["recurrent"]
    weights = dict(zip("ifzo", recurrent.unbind(1), strict=True))
    h, last = cell.recurrence(*gates[0].unbind(2), weights)
    for impl in ("torch", "reference"):
        o, state = slstm(gates, recurrent, impl=impl)
        assert relative_rms(o[0], h) <= 1e-12
        assert relative_rms(state[0], torch.stack(last, 1)) <= 1e-12


def slot_by_slot(x):
    """Table 4 of 001 with the transpose that it leaves out, for every row and head."""
    keys, values, o = x["key_memory"].mT, x["value_memory"], []
    for t in range(x["q"].shape[1]):
        a = x["log_decay"][:, t].exp().diag_embed()
        slots = x["slots"][:, t].unsqueeze(-2)
        keys = keys @ a + x["k"][:, t].unsqueeze(-1) * slots
        values = values @ a + x["v"][:, t].unsqueeze(-1) * slots
        scores = (keys.mT @ x["q"][:, t].unsqueeze(-1)).squeeze(-1) * K**-0.5
        o.append((values @ scores.softmax(-1).unsqueeze(-1)).squeeze(-1))
    return torch.stack(o, 1), keys.mT, values


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_two_memories_equal_the_recurrence(impl):
    x = OPERATORS["two memories"].draw()
    for found, expected in zip(two_memories(**x, impl=impl), slot_by_slot(x), strict=True):
        assert_close(found, expected)


def test_one_slot_is_plain_linear_recurrence_of_values():
    """The softmax over one slot is 1: what is read is the memory of values."""
    out = two_memories(**slots(1).draw())
    assert_close(out.o[:, -1], out.value_memory.squeeze(-1))


def test_bfloat16_keeps_its_memories_in_float32():
    x = {name: y.float() for name, y in OPERATORS["two memories"].draw().items()}
    x |= {name: x[name].bfloat16() for name in ("q", "k", "v", "slots")}
    out = two_memories(**x)
    assert (out.o.dtype, out.key_memory.dtype) == (torch.bfloat16, torch.float32)
    assert relative_rms(out.o, two_memories(**{n: y.double() for n, y in x.items()}).o) < 0.02


def weights_of(maps):
    """As the oracle has them: rows times W, and a bias apart."""
    pairs = {f"W{i + 1}": w[:, :-1].mT for i, w in enumerate(maps)}
    return pairs | {f"b{i + 1}": w[:, -1] for i, w in enumerate(maps)}


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("maps", [1, 2])
def test_ttt_equals_the_authors_recurrence(maps, impl):
    case = memories.make("ttt", maps, batch=2, tokens=40, size=8, begun=False)
    x, out = case.tensors, case.run(impl)
    network = ttt.linear if maps == 1 else ttt.mlp
    for row, head in [(0, 0), (1, 3)]:
        q, k = (x[name][row, :, head * H // HV] for name in "qk")
        expected, after = ttt.recurrence(
            network, weights_of([x[f"weights_{i + 1}"][row, head] for i in range(maps)]), q, k,
            x["v"][row, :, head], x["beta"][row, :, head], x["step_scale"], x["norm_weight"][head],
            x["norm_bias"][head],
        )  # fmt: skip
        assert relative_rms(out.o[row, :, head], expected) <= 1e-12
        found = weights_of([w[row, head] for w in out.final_state.weights])
        assert all(relative_rms(found[name], after[name]) <= 1e-12 for name in after)
    # Its mini-batches are whole.
    assert out.final_state.position.tolist() == [0, 0]
    assert all((summed == 0).all() for summed in out.final_state.gradients)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("maps", [1, 2])
@pytest.mark.parametrize("size", [1, 8])
def test_titans_equal_the_papers_recurrence(maps, size, impl):
    """Eq. 9, 10 and 13 to 15; with mini-batches, gradients at the memory before them."""
    case = memories.make("titans", maps, batch=2, tokens=27, size=size, begun=False)
    x, out = case.tensors, case.run(impl)
    memory = partial(titans.mlp, activation=partial(torch.nn.functional.gelu, approximate="tanh"))
    for row, head in [(0, 0), (1, 3)]:
        q, k = (x[name][row, :, head * H // HV] for name in "qk")
        v, theta, eta = (x[name][row, :, head] for name in ("v", "beta", "momentum"))
        weights = {f"W{i + 1}": x[f"weights_{i + 1}"][row, head] for i in range(maps)}
        alpha = 1 - x["log_decay"][row, :, head].exp()
        o, M, S = titans.recurrence(memory, weights, q, k, v, theta, eta, alpha, size)
        assert relative_rms(out.o[row, :, head], o) <= 1e-12
        for found, expected in ((out.final_state.weights, M), (out.final_state.momentum, S)):
            for y, wanted in zip(found, expected.values(), strict=True):
                assert relative_rms(y[row, head], wanted) <= 1e-12
