"""Packed and continued attention on a CUDA device, against float64."""

import copy

import pytest
import torch

import deltarule
from deltarule.nn import Attention
from tolerance import relative_rms

pytestmark = pytest.mark.gpu
LENGTHS = [700, 0, 1, 900, 447]


def make(kv_heads=2, head_dim=32):
    torch.manual_seed(0)
    return Attention(64, num_heads=4, num_kv_heads=kv_heads, head_dim=head_dim).cuda()


def run(layer, x, *given, **options):
    x = x.detach().clone().requires_grad_()
    y, _ = layer(x, *given, **options)
    (dx,) = torch.autograd.grad(y.double().sin().sum(), x)
    return y, dx


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed(kv_heads, dtype):
    layer, x = make(kv_heads).to(dtype), torch.randn(1, sum(LENGTHS), 64, device="cuda")
    exact = copy.deepcopy(layer).double()
    offsets = deltarule.pack(LENGTHS).cuda()
    found = run(layer, x.to(dtype), cu_seqlens=offsets)
    expected = run(exact, x.to(dtype).double(), cu_seqlens=offsets)
    bar = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for one, other in zip(found, expected, strict=True):
        assert relative_rms(one, other) < bar


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_continued(dtype):
    layer, x = make().to(dtype), torch.randn(2, 1900, 64, device="cuda").to(dtype)
    exact = copy.deepcopy(layer).double()
    mask = torch.ones(2, 800, dtype=torch.bool, device="cuda")
    mask[0, 30:100] = False
    states = []
    with torch.no_grad():
        for one, part in ((layer, x[:, :800]), (exact, x[:, :800].double())):
            states.append(one(part, mask=mask)[1])
    found = run(layer, x[:, 800:], states[0])
    expected = run(exact, x[:, 800:].double(), states[1])
    bar = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for one, other in zip(found, expected, strict=True):
        assert relative_rms(one, other) < bar


def test_memory_of_packed_tokens_is_linear():
    layer, peaks = make(4).bfloat16(), []
    for tokens in (8192, 32768):
        x = torch.randn(1, tokens, 64, device="cuda", dtype=torch.bfloat16)
        offsets = deltarule.pack([tokens // 8] * 8).cuda()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(layer, x, cu_seqlens=offsets)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 4.5 * peaks[0]
