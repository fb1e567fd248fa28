"""The convolution with slots: prompts, steps, drafts taken back, beside a loop and the layer."""

import pytest
import torch
import torch.nn.functional as F

from deltarule import pack
from deltarule.nn import ShortConv
from deltarule.ops.serving import convolution
from deltarule.serve import pool_convolution
from promised import promised
from tolerance import assert_close

promised("triton")


@pytest.fixture(params=["torch", "reference", "triton"])
def impl(request, monkeypatch) -> str:
    """Each implementation, the kernels in the interpreter."""
    if request.param == "triton":
        monkeypatch.setattr(convolution, "why_not_fused", lambda x: None)
    return request.param


def whole(x, weight, bias, activated=True):
    """One request from its first token on, x [T, D]."""
    padded = F.pad(x.T, (weight.shape[1] - 1, 0))
    y = F.conv1d(padded[None], weight[:, None], bias, groups=len(weight))[0].T
    return F.silu(y) if activated else y


LENGTHS = (5, 0, 1, 9)


@pytest.mark.parametrize(("taps", "activated", "biased"), [(4, True, False), (2, False, True)])
def test_prompts_then_tokens_are_one_convolution(impl, taps, activated, biased) -> None:
    weight, bias = torch.randn(6, taps), torch.randn(6) if biased else None
    pool = torch.randn(9, 6, taps - 1).mT
    before, slots = pool.clone(), torch.tensor([4, 7, 2, 0], dtype=torch.int32)
    prompts, more = [torch.randn(n, 6) for n in LENGTHS], torch.randn(4, 2, 6)
    given = {"bias": bias, "activated": activated, "state": pool, "impl": impl}
    out = torch.empty(1, 15, 6)
    y = pool_convolution(
        torch.cat(prompts)[None], weight, state_indices=torch.full((4,), -1), write_indices=slots,
        cu_seqlens=pack(LENGTHS), out=out, **given,
    )  # fmt: skip
    assert y is out
    for x, found in zip(prompts, y[0].split(LENGTHS), strict=True):
        assert len(x) == 0 or assert_close(found, whole(x, weight, bias, activated)) is None
    assert torch.equal(pool[7], before[7])
    pool[7] = 0
    steps = pool_convolution(more, weight, state_indices=slots, **given)
    for x, new, found in zip(prompts, more, steps, strict=True):
        expected = whole(torch.cat([x, new]), weight, bias, activated)
        assert_close(found, expected[len(x) :])
    assert torch.equal(pool[[1, 3, 5, 6, 8]], before[[1, 3, 5, 6, 8]])


def test_drafts_are_taken_back(impl) -> None:
    """Rows of 3, 1 and 2 drafted tokens; then from what was accepted of them."""
    weight, pool = torch.randn(6, 4), torch.randn(7, 5, 6)
    prompts = [torch.randn(7, 6) for _ in range(3)]
    slots, given = torch.tensor([3, 6, 1]), {"state": pool, "impl": impl, "null_index": 0}
    start = {"state_indices": torch.zeros(3, dtype=torch.int64), "write_indices": slots}
    pool_convolution(torch.stack(prompts), weight, **start, **given)
    accepted = torch.ones(3, dtype=torch.int32)
    for lengths, taken in (((3, 1, 2), (2, 1, 1)), ((1, 3, 3), (1, 3, 2)), ((2, 2, 1), (1, 2, 1))):
        drafts = [torch.randn(n, 6) for n in lengths]
        y = pool_convolution(
            torch.cat(drafts)[None], weight, state_indices=slots, accepted=accepted,
            cu_seqlens=pack(lengths), **given,
        )  # fmt: skip
        for row, found in enumerate(y[0].split(lengths)):
            seen = torch.cat([prompts[row], drafts[row]])
            assert_close(found, whole(seen, weight, None)[len(prompts[row]) :])
            prompts[row] = seen[: len(prompts[row]) + taken[row]]
        accepted = torch.tensor(taken, dtype=torch.int32)


def test_it_is_the_layers_convolution(impl) -> None:
    layer, x = ShortConv(6), torch.randn(2, 5, 6)
    pool = torch.zeros(2, 3, 6, dtype=torch.float16)
    with torch.no_grad():
        y = pool_convolution(
            x, layer.weight, state=pool, state_indices=torch.tensor([1, 0]), impl=impl
        )
        padded = F.pad(x, (0, 0, 3, 0))
    assert_close(y, torch.stack([whole(row, layer.weight.detach(), None) for row in x]))
    assert torch.equal(pool, padded[[1, 0], -3:].half())
