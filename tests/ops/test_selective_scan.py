"""`selective_scan` in PyTorch against its definition, and the contracts of its registered forms."""

import sys

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from deltarule import RecurrentOutput, pack, selective_scan
from deltarule.ops.selective_scan import torch as scan_layout
from deltarule.ops.selective_scan.registered import scan_operator
from oracles import decaying_fast_weights as dfw
from oracles import mamba
from tolerance import assert_close, relative_rms

H, HV, K, V = 2, 4, 3, 5
NAMES = (
    "q", "k", "v", "delta", "A", "value_log_decay", "log_decay", "beta", "initial_state",
)  # fmt: skip
# Which arguments each published form has; "constant" q and k are those of S4.
FORMS = {
    "mamba": {"delta", "A"},
    "s4": {"delta", "A", "constant"},
    "dfw": {"value_log_decay", "log_decay"},
    "longhorn": {"beta"},
    "all": {"delta", "A", "value_log_decay", "log_decay", "beta"},
    "all constant": {"delta", "A", "value_log_decay", "log_decay", "beta", "constant"},
    "none": set(),
}

# Whether the decays of `run` and `flat` are signed.
SIGNED = False


@pytest.fixture
def signed(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SIGNED", True)


def draw(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64)


def make(form: str, tokens: int = 150, lengths=None, state: bool = True) -> dict[str, Tensor]:
    torch.manual_seed(3)
    batch, sequences = (2, 2) if lengths is None else (1, len(lengths))
    tokens = tokens if lengths is None else sum(lengths)
    constant = "constant" in FORMS[form]
    channels = (HV, V, K) if constant else (batch, tokens, H, K)
    given = {
        "q": draw(*channels), "k": 0.5 * draw(*channels), "v": draw(batch, tokens, HV, V),
        "delta": draw(batch, tokens, HV, V).exp(), "A": -draw(HV, V, K).exp(),
        "value_log_decay": -0.1 * draw(batch, tokens, HV, V).exp(),
        "log_decay": -0.1 * draw(batch, tokens, HV, K).exp(),
        "beta": draw(batch, tokens, HV, V).sigmoid(),
        "initial_state": draw(sequences, HV, V, K),
    }  # fmt: skip
    kept = FORMS[form] | {"q", "k", "v"} | ({"initial_state"} if state else set())
    return {name: x for name, x in given.items() if name in kept}


def run(tensors: dict[str, Tensor], impl: str, lengths=None) -> RecurrentOutput:
    others = {name: x for name, x in tensors.items() if name not in ("q", "k", "v")}
    offsets = None if lengths is None else pack(lengths)
    return selective_scan(
        tensors["q"], tensors["k"], tensors["v"], **others, cu_seqlens=offsets, impl=impl,
        signed=SIGNED,
    )  # fmt: skip


def gradients(tensors: dict[str, Tensor], impl: str, lengths=None) -> dict[str, Tensor]:
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    out = run(leaves, impl, lengths)
    torch.manual_seed(4)
    loss = (out.o * torch.randn_like(out.o)).sum()
    (loss + (out.final_state * torch.randn_like(out.final_state)).sum()).backward()
    return {name: x.grad for name, x in leaves.items()}


LENGTHS = (70, 0, 1, 130, 5)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_definition(form, lengths):
    tensors = make(form, lengths=lengths)
    out, expected = (run(tensors, impl, lengths) for impl in ("torch", "reference"))
    assert_close(out.o, expected.o)
    assert_close(out.final_state, expected.final_state)
    found, wanted = (gradients(tensors, impl, lengths) for impl in ("torch", "reference"))
    for name in tensors:
        assert_close(found[name], wanted[name], gradient=True, name=name)


@pytest.mark.usefixtures("signed")
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("form", ["mamba", "s4", "dfw", "all"])
def test_signed_decays_equal_the_definition(form, lengths):
    test_equals_the_definition(form, lengths)


@pytest.mark.usefixtures("signed")
@pytest.mark.parametrize("form", ["mamba", "all"])
def test_gradcheck_of_signed_decays(form):
    test_gradcheck(form, None)


def test_a_signed_state_by_its_oracle():
    """arXiv 2411.12537, section 5: the factor is 2 exp(..) - 1, and the input stays as it is."""
    given = make("mamba", tokens=20, state=False)
    expected, _ = mamba.recurrence(
        given["q"][0, :, 0], given["k"][0, :, 0], given["v"][0, :, 0], given["delta"][0, :, 0],
        (-given["A"][0]).log(), torch.zeros(V, dtype=torch.float64), signed=True,
    )  # fmt: skip
    decays = {"delta": given["delta"], "A": given["A"], "signed": True}
    for impl in ("torch", "reference", "auto"):
        v = given["v"] * given["delta"]
        out = selective_scan(given["q"], given["k"], v, **decays, scale=1.0, impl=impl)
        assert_close(out.o[0, :, 0], expected)


@pytest.mark.parametrize("elements", [1, 2**14, 2**30])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_windows_of_any_size_agree(elements, lengths, monkeypatch):
    monkeypatch.setattr(scan_layout, "window_elements", lambda device: elements)
    tensors = make("all", lengths=lengths)
    assert_close(run(tensors, "torch", lengths).o, run(tensors, "reference", lengths).o)
    found, wanted = (gradients(tensors, impl, lengths) for impl in ("torch", "reference"))
    for name in tensors:
        assert_close(found[name], wanted[name], gradient=True, name=name)


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


def test_decays_on_two_sides_go_no_token_by_token(monkeypatch):
    monkeypatch.delattr(scan_layout, "decay")
    q, k, a = torch.randn(3, 1, 70, 2, 4)[:, :, :, :1].unbind()
    v = torch.randn(1, 70, 1, 3)
    selective_scan(q, k, v, log_decay=-a.exp(), value_log_decay=-v.exp(), impl="torch")


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


@pytest.mark.parametrize("form", ["mamba", "all"])
def test_states_carry_over(form):
    tensors = make(form, tokens=90)
    whole = run(tensors, "torch")
    state, parts = tensors["initial_state"], []
    for start, stop in ((0, 1), (1, 40), (40, 40), (40, 90)):
        part = {n: x[:, start:stop] if x.ndim == 4 and n != "initial_state" else x
                for n, x in tensors.items()}  # fmt: skip
        o, state = run(part | {"initial_state": state}, "torch")
        parts.append(o)
    assert_close(torch.cat(parts, 1), whole.o)
    assert_close(state, whole.final_state)


def test_resets_leave_nothing_and_are_differentiable():
    tensors = make("dfw")
    tensors["log_decay"][:, 64::29] = -torch.inf
    tensors["value_log_decay"][:, 33] = -1e6
    found, wanted = (gradients(tensors, impl) for impl in ("torch", "reference"))
    for name in tensors:
        assert found[name].isfinite().all(), name
        assert_close(found[name], wanted[name], gradient=True, name=name)
    changed = tensors | {"v": tensors["v"].clone()}
    changed["v"][:, :64] += 1
    assert torch.equal(run(changed, "torch").o[:, 64:], run(tensors, "torch").o[:, 64:])


def test_is_strictly_causal():
    tensors = make("all")
    changed = {
        name: torch.cat([x[:, :100], x[:, 100:] * 0.5], 1)
        if x.ndim == 4 and name != "initial_state" else x
        for name, x in tensors.items()
    }  # fmt: skip
    o, other = run(tensors, "torch").o, run(changed, "torch").o
    assert torch.equal(o[:, :100], other[:, :100])
    assert not torch.equal(o[:, 100:], other[:, 100:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision(dtype):
    exact = make("mamba", tokens=300)
    kept = ("delta", "A", "initial_state")
    rounded = {n: x.float() if n in kept else x.to(dtype) for n, x in exact.items()}
    out = run(rounded, "torch")
    expected = run({name: x.double() for name, x in rounded.items()}, "reference")
    assert out.o.dtype == dtype
    assert out.final_state.dtype == torch.float32
    assert relative_rms(out.final_state, expected.final_state) < 1e-6
    assert relative_rms(out.o, expected.o) < {torch.float32: 1e-6, torch.bfloat16: 3e-3}[dtype]


def test_memory_stays_below_that_of_all_states():
    """A saved state for each chunk of 64 tokens, not for each token."""
    tensors = {n: x.requires_grad_() for n, x in make("mamba", tokens=1024, state=False).items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        run(tensors, "torch")
    assert sum(x.numel() for x in kept if x.shape[1:] == (HV, V, K)) == 2 * 1024 // 64 * HV * V * K
    assert max(x.numel() for x in kept) < 2 * 1024 * HV * V * K // 2


def flat(form: str, lengths=None) -> list:
    tensors = make(form, tokens=5, lengths=lengths)
    offsets = None if lengths is None else pack(lengths)
    return [*(tensors.get(name) for name in NAMES), offsets, 0.5, SIGNED]


CASES = [("mamba", None), ("s4", (3, 0, 2)), ("dfw", None), ("all", (4, 1)), ("none", None)]


@pytest.mark.parametrize(("form", "lengths"), CASES)
def test_opcheck(form, lengths):
    arguments = flat(form, lengths)
    assert set(opcheck(scan_operator.operator, (*arguments, False, "torch")).values()) == {
        "SUCCESS"
    }
    o, state, saved = scan_operator.operator(*arguments, True, "torch")
    backward = (
        torch.randn_like(o),
        torch.randn_like(state),
        saved,
        *arguments,
        True,
        "torch",
        [True] * 9,
    )
    assert set(opcheck(scan_operator.backward_operator, backward).values()) == {"SUCCESS"}
    leaves = [x.requires_grad_() if i < 9 and x is not None else x for i, x in enumerate(arguments)]
    assert set(opcheck(scan_operator.operator, (*leaves, True, "torch")).values()) == {"SUCCESS"}


@pytest.mark.parametrize(("form", "lengths"), CASES)
def test_gradcheck(form, lengths):
    arguments = flat(form, lengths)
    leaves = [None if x is None else x.requires_grad_() for x in arguments[:9]]
    assert torch.autograd.gradcheck(
        lambda *tensors: scan_operator.operator(*tensors, *arguments[9:], True, "torch")[:2], leaves
    )


@pytest.mark.parametrize("lengths", [None, (30, 40)])
def test_vmap_and_grad(lengths):
    tensors = make("all", tokens=70, lengths=lengths)
    other = {name: x.flip(0) if x.ndim == 3 else x * 0.9 for name, x in tensors.items()}
    stacked = {name: torch.stack([tensors[name], other[name]]) for name in tensors}

    def loss(given):
        out = run(given, "torch", lengths)
        return out.o.square().sum() + out.final_state.sum()

    found = torch.vmap(torch.func.grad(loss))(stacked)
    for row, given in enumerate((tensors, other)):
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        loss(leaves).backward()
        for name, leaf in leaves.items():
            assert_close(found[name][row], leaf.grad, gradient=True, name=name)


def test_second_derivatives_are_refused():
    tensors = make("mamba", tokens=3, state=False)
    v = tensors["v"].requires_grad_()
    (dv,) = torch.autograd.grad(run(tensors, "torch").o.square().sum(), v, create_graph=True)
    with pytest.raises(NotImplementedError, match='impl="reference"'):
        dv.sum().backward()
    with pytest.raises(NotImplementedError, match='impl="reference"'):
        torch.func.jvp(lambda v: run(tensors | {"v": v}, "torch").o, (v,), (v,))


BAD = {
    r"v must have 4 axes \[B, T, HV, V\], got \[4\]": {"v": torch.zeros(4)},
    "v must be float64, float32, bfloat16 or float16, got torch.int64": {
        "v": torch.zeros(1, 2, HV, V).long()
    },
    "v needs at least one head": {"v": torch.zeros(1, 2, 0, V)},
    r"q must have 4 axes \[B, T, H, K\] or constant \[HV, V, K\], got \[3\]": {"q": torch.zeros(3)},
    r"k must be \[HV, V, K\] = \[4, 5, 3\], got \[4, 5, 2\]": {"k": torch.zeros(HV, V, 2)},
    r"k must be \[B, T, H, K\] = \[1, 2, 2, 3\], got": {"k": torch.zeros(1, 3, 2, K)},
    "v must have a multiple of the 3 heads of k, got 4": {"k": torch.zeros(1, 2, 3, K)},
    "k is torch.float64, but v is torch.float32": {"k": torch.zeros(1, 2, 2, K).double()},
    "delta and A go together, got only A": {"A": torch.zeros(HV, V, K)},
    r"A must be \[HV, V, K\]": {"A": torch.zeros(HV, K, V)},
    r"delta must be \[B, T, HV, V\]": {"delta": torch.zeros(1, 2, HV)},
    r"value_log_decay must be \[B, T, HV, V\]": {"value_log_decay": torch.zeros(1, 2, HV, K)},
    r"log_decay must be \[B, T, HV, K\]": {"log_decay": torch.zeros(HV)},
    r"log_decay must be float32 \(or float64\), got torch.bfloat16": {
        "log_decay": torch.zeros(1, 2, HV, K).bfloat16()
    },
    r"beta must be \[B, T, HV, V\]": {"beta": torch.zeros(1, 2, HV)},
    "initial_state must be torch.float32": {"initial_state": torch.zeros(1, HV, V, K).double()},
    "cu_seqlens must end at T = 2": {"cu_seqlens": torch.tensor([0, 1])},
    "scale must be a number": {"scale": "1"},
    "impl='triton' cannot run this: Triton needs CUDA tensors, and v is on cpu": {"impl": "triton"},
    "impl must be one of 'auto', 'triton', 'torch', 'reference', got 'gluon'": {"impl": "gluon"},
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_arguments_are_named(message):
    given = {
        "q": torch.zeros(1, 2, 2, K), "k": torch.zeros(1, 2, 2, K), "v": torch.zeros(1, 2, HV, V)
    } | BAD[message]  # fmt: skip
    with pytest.raises(ValueError, match=message):
        selective_scan(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_gradients_are_laid_out_as_a_compiler_is_told():
    """Whatever the strides of v: compiled code views its gradient."""
    tensors = make("mamba", tokens=6)
    v = tensors["v"].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    (found,) = torch.autograd.grad(run(tensors | {"v": v}, "torch").o.sum(), v)
    assert found.is_contiguous()
