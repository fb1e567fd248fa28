"""`long_convolution` against its definition and against the authors' sums, transcribed."""

import pytest
import torch

from deltarule import long_convolution, pack
from deltarule.ops.long_convolution.torch.operator import operator
from oracles import hyena
from tolerance import assert_close, relative_rms

DOUBLE = torch.float64
# Channels of q and k; None has neither.
KEYS = [None, 1, 3]
# Fewer taps than tokens, more, and one alone; halves by product and by FFT.
SIZES = {"long": (70, 80), "short": (70, 10), "one": (9, 1)}
LENGTHS = [1, 0, 48, 2, 19, 0]


def make(keys, tokens=150, taps=11, batch=2, heads=2, dtype=DOUBLE):
    torch.manual_seed(0)
    given = {"v": torch.randn(batch, tokens, heads, 1 if keys == 1 else 2, dtype=dtype)}
    given["taps"] = torch.randn(heads, taps, dtype=dtype)
    if keys:
        given["q"], given["k"] = torch.randn(2, batch, tokens, heads, keys, dtype=dtype).unbind()
    return given


def history(given, sequences):
    channels = given["v"].shape[3] + (given["k"].shape[3] if "k" in given else 0)
    size = sequences, given["taps"].shape[1] - 1, given["v"].shape[2], channels
    return torch.randn(size, dtype=DOUBLE)


def gradients(given, **options):
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    o, state = long_convolution(**leaves, **options)
    loss = (o * torch.linspace(-1, 1, o.numel()).view_as(o)).sum() + state.square().sum()
    return o, state, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("carried", [False, True])
def test_by_its_definition(keys, size, packed, carried):
    tokens, taps = SIZES[size]
    lengths = LENGTHS if packed else None
    given = make(keys, sum(lengths) if packed else tokens, taps, batch=1 if packed else 2)
    if carried:
        given["initial_state"] = history(given, len(LENGTHS) if packed else 2)
    offsets = {"cu_seqlens": pack(lengths)} if packed else {}
    found = gradients(given, **offsets)
    exact = gradients(given, impl="reference", **offsets)
    assert_close(found[0], exact[0], name="o")
    assert torch.equal(found[1], exact[1])
    for name, x, y in zip(given, found[2], exact[2], strict=True):
        if y is not None:
            assert_close(x, y, gradient=True, name=name)


@pytest.mark.parametrize("keys", KEYS)
def test_float32_and_bfloat16(keys):
    given = make(keys, 100, 100, dtype=torch.float32)
    exact = long_convolution(**{name: x.double() for name, x in given.items()}, impl="reference").o
    assert_close(long_convolution(**given).o, exact)
    rounded = {name: x if name == "taps" else x.bfloat16() for name, x in given.items()}
    wide = {name: x.double() for name, x in rounded.items()}
    o, state = long_convolution(**rounded)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert relative_rms(o, long_convolution(**wide, impl="reference").o) < 4e-3


@pytest.mark.parametrize("keys", KEYS)
def test_step_by_step_and_padding(keys):
    given = make(keys, 40, 9)
    taps = given.pop("taps")
    whole, after = long_convolution(taps=taps, **given)
    state = history({**given, "taps": taps}, 2) * 0
    steps = []
    for t in range(40):
        one = {name: x[:, t : t + 1] for name, x in given.items()}
        o, state = long_convolution(taps=taps, initial_state=state, **one)
        steps.append(o)
    assert_close(torch.cat(steps, 1), whole)
    assert torch.equal(state, after)
    counts = torch.tensor([5, 40])
    o, padded = long_convolution(taps=taps, lengths=counts, **given)
    front = {name: x[:1, :5] for name, x in given.items()}
    alone = long_convolution(taps=taps, **front)
    assert_close(o[:1, :5], alone.o)
    assert torch.equal(padded[:1], alone.final_state)


@pytest.mark.parametrize("keys", KEYS)
def test_strictly_causal(keys):
    given = make(keys, 150, 150, dtype=torch.float32)
    expected = long_convolution(**given).o[:, :141]
    for value in (1e6, float("nan")):
        if keys == 3 and value != value:
            # Products leave the definition's promise to the page.
            continue
        changed = {name: x.clone() for name, x in given.items()}
        changed["v"][:, 141:] = value
        assert torch.equal(long_convolution(**changed).o[:, :141], expected)


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


def test_opcheck_of_the_operator():
    given = make(1, 5, 3)
    tensors = given["v"], given["taps"], given["q"], given["k"]
    leaves = [x.requires_grad_() for x in tensors]
    torch.library.opcheck(operator.operator, (*leaves, None))


def test_wrong_arguments_are_named():
    given = make(3, 5, 3)
    for name, changed, message in (
        ("v", given["v"][0], r"v must be a floating-point tensor \[B, T, H, V\]"),
        ("q", None, "q and k go together, got only k"),
        ("taps", given["taps"][:1], r"taps must be \[H, L\]"),
        (
            "initial_state",
            torch.zeros(2, 3, 2, 5),
            r"initial_state must be \[N, L - 1, H, K \+ V\]",
        ),
        ("lengths", torch.tensor([1, 6]), "lengths must be from 0 to 5"),
        ("impl", "triton", "impl must be one of 'auto', 'torch', 'reference'"),
    ):
        with pytest.raises(ValueError, match=message):
            long_convolution(**{**given, name: changed})
