"""The Triton kernels of `selective_scan` without a GPU: under the interpreter, against float64."""

import pytest
import torch
from torch.library import opcheck

from deltarule import pack
from ops import test_selective_scan as scan
from promised import promised
from tolerance import assert_close, relative_rms

promised("triton")

from deltarule.ops.selective_scan.registered import scan_operator
from deltarule.ops.selective_scan.triton import passes as kernels

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here: see test_scan_on_gpu"
)
LENGTHS = (5, 0, 1, 6, 0)


def make(form, tokens=11, lengths=None, dtype=torch.float32):
    """A call of 11 tokens whose chunks have 4, so that there is something to carry."""
    tensors = scan.make(form, tokens=tokens, lengths=lengths)
    kept = ("delta", "A", "value_log_decay", "log_decay", "initial_state")
    return {n: x.float() if n in kept else x.to(dtype) for n, x in tensors.items()}


def call(tensors, lengths=None):
    """As `selective_scan` calls it, but on the CPU."""
    offsets = None if lengths is None else pack(lengths)
    named = [tensors.get(name) for name in scan.NAMES]
    o, final, _ = scan_operator.operator(*named, offsets, scan.K**-0.5, scan.SIGNED, True, "triton")
    return o, final


def differentiated(run, tensors):
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    o, final = run(leaves)
    torch.manual_seed(4)
    weights = [torch.randn(x.shape, dtype=torch.float64) for x in (o, final)]
    sum((x * w.to(x.dtype)).sum() for x, w in zip((o, final), weights, strict=True)).backward()
    return (o, final), {name: x.grad for name, x in leaves.items()}


def both(tensors, lengths=None):
    exact = {name: x.double() for name, x in tensors.items()}
    return (
        differentiated(lambda x: call(x, lengths), tensors),
        differentiated(lambda x: scan.run(x, "reference", lengths), exact),
    )


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(kernels, "tokens_in_chunk", lambda inputs: 4)
    monkeypatch.setattr(kernels, "HELD", 2)
    monkeypatch.setattr(scan, "H", 1)
    monkeypatch.setattr(scan, "HV", 2)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("form", scan.FORMS)
def test_float32(form, lengths):
    (outputs, gradients), (expected, exact) = both(make(form, lengths=lengths), lengths)
    for x, y in zip(outputs, expected, strict=True):
        assert_close(x, y, dtype=torch.float32)
    for name, gradient in gradients.items():
        assert_close(gradient, exact[name], dtype=torch.float32, gradient=True, name=name)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("form", ["mamba", "all"])
def test_signed_decays(form, lengths, monkeypatch):
    monkeypatch.setattr(scan, "SIGNED", True)
    test_float32(form, lengths)


@pytest.mark.parametrize("form", ["all", "all constant"])
def test_float16_inputs_are_rounded_once(form):
    tensors = make(form, dtype=torch.float16)
    (outputs, gradients), (expected, exact) = both(tensors)
    assert relative_rms(outputs[0], expected[0]) < 2**-10
    assert_close(outputs[1], expected[1], dtype=torch.float32)
    for name, gradient in gradients.items():
        assert gradient.dtype == tensors[name].dtype
        assert relative_rms(gradient, exact[name]) < 2**-10, name


@pytest.mark.parametrize("sizes", [(1, 1), (40, 3), (5, 70)])
def test_any_size(sizes, monkeypatch):
    """Keys and values that fill no tile, and several tiles of values."""
    monkeypatch.setattr(scan, "K", sizes[0])
    monkeypatch.setattr(scan, "V", sizes[1])
    (outputs, gradients), (expected, exact) = both(make("all", tokens=5))
    for x, y in zip(outputs, expected, strict=True):
        assert_close(x, y, dtype=torch.float32)
    for name, gradient in gradients.items():
        assert_close(gradient, exact[name], dtype=torch.float32, gradient=True, name=name)


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_sequence_of_one_chunk_carries_nothing(tokens):
    tensors = make("all", tokens=tokens)
    (outputs, gradients), (expected, exact) = both(tensors)
    assert_close(outputs[1], expected[1], dtype=torch.float32)
    del tensors["initial_state"]
    out = call(tensors)
    assert_close(out[0], scan.run({n: x.double() for n, x in tensors.items()}, "reference").o,
                 dtype=torch.float32)  # fmt: skip
    for name, gradient in gradients.items():
        assert_close(gradient, exact[name], dtype=torch.float32, gradient=True, name=name)


def test_resets():
    tensors = make("dfw")
    tensors["log_decay"][:, 3::5] = -torch.inf
    tensors["value_log_decay"][:, 7] = -1e6
    (outputs, gradients), (expected, exact) = both(tensors)
    assert_close(outputs[0], expected[0], dtype=torch.float32)
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
        assert_close(gradient, exact[name], dtype=torch.float32, gradient=True, name=name)


def test_causal_and_repeatable_bit_by_bit():
    tensors = make("all")
    (o, _), first = differentiated(call, tensors)
    (again, _), second = differentiated(call, tensors)
    assert torch.equal(o, again)
    assert all(torch.equal(first[name], second[name]) for name in first)
    changed = {
        name: torch.cat([x[:, :6], x[:, 6:] * 0.5], 1)
        if x.ndim == 4 and name != "initial_state" else x
        for name, x in tensors.items()
    }  # fmt: skip
    other, _ = call(changed)
    assert torch.equal(o[:, :6], other[:, :6])
    assert not torch.equal(o[:, 6:], other[:, 6:])


def test_views_of_any_strides():
    tensors = make("all")
    turned = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in tensors.items()}
    for x, y in zip(call(turned), call(tensors), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("lengths", [None, (4, 0, 1)])
def test_the_registered_operator_keeps_its_promises(lengths):
    tensors = make("mamba", tokens=5, lengths=lengths)
    offsets = None if lengths is None else pack(lengths)
    arguments = *(tensors.get(name) for name in scan.NAMES), offsets, 0.5, False
    tests = ("test_schema", "test_faketensor")
    given = *arguments, True, "triton"
    checked = opcheck(scan_operator.operator, given, test_utils=tests)
    assert set(checked.values()) == {"SUCCESS"}
    o, state, saved = scan_operator.operator(*given)
    wanted = [x is not None for x in arguments[:9]]
    backward = (torch.randn_like(o), torch.randn_like(state), saved, *given, wanted)
    checked = opcheck(scan_operator.backward_operator, backward, test_utils=tests)
    assert set(checked.values()) == {"SUCCESS"}


def test_without_saved_states_the_forward_runs_again():
    tensors = make("all")
    named = [tensors.get(name) for name in scan.NAMES]
    given = kernels.ScanInputs(*named, None, 0.5, False)
    o, final, saved = kernels.forward(given, True)
    assert saved.shape == kernels.saved_shape(given)
    d_o, d_final = torch.randn_like(o), torch.randn_like(final)
    kept = kernels.backward(d_o, d_final, given, saved)
    recomputed = kernels.backward(d_o, d_final, given, saved[:0])
    assert all(torch.equal(x, y) for x, y in zip(kept, recomputed, strict=True))


def test_no_tokens_leave_the_state():
    tensors = make("all", tokens=0)
    o, final = call(tensors)
    assert o.shape[1] == 0
    assert torch.equal(final, tensors["initial_state"])
