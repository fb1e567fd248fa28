"""`selective_scan` and `two_memories` on a CUDA device, against their definitions in float64."""

import pytest
import torch

from deltarule import pack, selective_scan
from ops import test_selective_scan as scan
from ops import test_two_memories as memories
from tolerance import assert_close, relative_rms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
every_impl = pytest.mark.parametrize("impl", ["triton", "torch"])
FLOAT = ("delta", "A", "value_log_decay", "log_decay", "initial_state")


@every_impl
@pytest.mark.parametrize("lengths", [None, scan.LENGTHS])
@pytest.mark.parametrize("form", scan.FORMS)
def test_scan(form, lengths, impl):
    tensors = scan.make(form, tokens=300, lengths=lengths)
    leaves = {n: x.float().cuda().requires_grad_() for n, x in tensors.items()}
    exact = {n: x.float().double().requires_grad_() for n, x in tensors.items()}
    found, expected = scan.run(leaves, impl, lengths), scan.run(exact, "reference", lengths)
    assert_close(found.o, expected.o, dtype=torch.float32)
    assert_close(found.final_state, expected.final_state, dtype=torch.float32)
    for out in (found, expected):
        (out.o.square().sum() + out.final_state.square().sum()).backward()
    for name, leaf in leaves.items():
        assert_close(leaf.grad, exact[name].grad, gradient=True, dtype=torch.float32, name=name)


@every_impl
@pytest.mark.parametrize("lengths", [None, scan.LENGTHS])
@pytest.mark.parametrize("form", ["mamba", "all"])
def test_signed_scan(form, lengths, impl, monkeypatch):
    monkeypatch.setattr(scan, "SIGNED", True)
    test_scan(form, lengths, impl)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["mamba", "s4", "longhorn", "all"])
def test_scan_in_16_bits_is_rounded_once(form, dtype):
    tensors = scan.make(form, tokens=300)
    rounded = {n: x.float() if n in FLOAT else x.to(dtype) for n, x in tensors.items()}
    leaves = {n: x.cuda().requires_grad_() for n, x in rounded.items()}
    exact = {n: x.double().requires_grad_() for n, x in rounded.items()}
    found, expected = scan.run(leaves, "triton"), scan.run(exact, "reference")
    unit = torch.finfo(dtype).eps
    assert relative_rms(found.o, expected.o) < unit
    assert_close(found.final_state, expected.final_state, dtype=torch.float32)
    weights = torch.randn(found.o.shape)
    for out in (found, expected):
        (out.o * weights.to(out.o)).sum().backward()
    for name, leaf in leaves.items():
        assert relative_rms(leaf.grad, exact[name].grad) < unit, name


@pytest.mark.parametrize("sizes", [(1, 1), (200, 3), (1500, 5), (16, 300)])
def test_scan_of_any_size(sizes, monkeypatch):
    monkeypatch.setattr(scan, "K", sizes[0])
    monkeypatch.setattr(scan, "V", sizes[1])
    tensors = {n: x.float() for n, x in scan.make("all", tokens=70).items()}
    # A write of a long key must not overshoot.
    tensors["k"] /= sizes[0] ** 0.5
    gradients = []
    for device, dtype, impl in (("cuda", torch.float32, "triton"), ("cpu", torch.float64, "torch")):
        leaves = {n: x.to(device, dtype).requires_grad_() for n, x in tensors.items()}
        out = scan.run(leaves, impl)
        loss = out.o.square().sum() + out.final_state.square().sum()
        gradients.append(torch.autograd.grad(loss, list(leaves.values())))
    for name, found, exact in zip(tensors, *gradients, strict=True):
        assert_close(found, exact, gradient=True, dtype=torch.float32, name=name)


def test_scans_are_chosen_and_wait_for_nothing():
    tensors = {n: x.float().cuda() for n, x in scan.make("all").items()}
    offsets = pack(scan.LENGTHS).cuda()
    row = {n: x.float().cuda() for n, x in scan.make("all", lengths=scan.LENGTHS).items()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = scan.run(tensors, "auto")
        named = {n: x for n, x in row.items() if n not in ("q", "k", "v")}
        selective_scan(row["q"], row["k"], row["v"], **named, cu_seqlens=offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(scan.run(tensors, "auto").o, first.o)


@every_impl
def test_scan_of_a_layer_of_the_papers_size(impl):
    """Mamba at 1536 value channels, 2048 tokens: finite, and within float32 of its definition."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2048, 1, 16).unbind()
    v, delta = torch.randn(1, 2048, 1, 1536), torch.rand(1, 2048, 1, 1536) * 0.1
    rates = -torch.arange(1.0, 17).expand(1, 1536, 16)
    inputs = (q, k, delta * v)
    out = selective_scan(*(x.cuda() for x in inputs), delta=delta.cuda(), A=rates.cuda(), impl=impl)
    exact = selective_scan(*(x.double() for x in inputs), delta=delta.double(), A=rates.double())
    assert_close(out.o, exact.o, dtype=torch.float32)


@pytest.mark.parametrize("lengths", [None, (30, 0, 40)])
def test_memories(lengths):
    x = memories.make() if lengths is None else memories.make(1, 3)
    offsets = None if lengths is None else pack(lengths)
    rounded = {name: value.float() for name, value in x.items()}
    found = memories.run({n: y.cuda() for n, y in rounded.items()}, cu_seqlens=offsets)
    expected = memories.run({n: y.double() for n, y in rounded.items()}, cu_seqlens=offsets)
    for here, there in zip(found, expected, strict=True):
        assert_close(here, there, dtype=torch.float32)
