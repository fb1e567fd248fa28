"""The fused operators beside the recurrence on a GPU: waiting, graphs, memory, whole layers.

Their numbers are held in tests/ops/test_neighbours.py.
"""

from contextlib import nullcontext

import pytest
import torch

import truth
from deltarule.models import linear_next_token_loss, next_token_loss
from deltarule.nn import mlp, norm, short_conv
from deltarule.ops.fused import short_conv as conv_ops
from deltarule.ops.fused_kernels import why_not_fused
from neighbours import MAKERS, PACKED, conv, with_gradients
from tolerance import relative_rms
from truth import captured, waits_for_nothing

pytestmark = pytest.mark.gpu
# These cases lay out their tokens, or move their targets, from the host.
FROM_HOST = "packed", "empty", "few tokens", "padded", "three", "entropy", "embedding"


@pytest.mark.parametrize("name", MAKERS)
def test_runs_are_equal_bitwise_within_nan_and_wait_for_nothing(name) -> None:
    case = MAKERS[name]().to(torch.bfloat16, truth.DEVICE)
    weights = [torch.randn_like(x) for x in case.fused(case.tensors)]
    around = {x: truth.surrounded(y) for x, y in case.tensors.items()}
    first = with_gradients(case.fused, case.tensors, weights)
    waits = not any(of in name for of in FROM_HOST)
    with waits_for_nothing() if waits else nullcontext():
        second = with_gradients(case.fused, case.tensors, weights)
    for outputs, gradients in (second, with_gradients(case.fused, around, weights)):
        assert all(map(torch.equal, outputs, first[0]))
        assert all(torch.equal(x, first[1][leaf]) for leaf, x in gradients.items())
    assert all(x.isfinite().all() for x in (*first[0], *first[1].values()))


@pytest.mark.parametrize(
    "name", ["conv", "norm in three parts", "head decay", "channel decay", "write strength"]
)
def test_a_row_alone_equals_the_row_in_a_batch(name) -> None:
    case = MAKERS[name]().to(torch.bfloat16, truth.DEVICE)
    weights = [torch.randn_like(x) for x in case.fused(case.tensors)]
    together = with_gradients(case.fused, case.tensors, weights)
    for row in (slice(0, 1), slice(1, 2)):
        own = {x: y if x in case.wide else y[row] for x, y in case.tensors.items()}
        outputs, gradients = with_gradients(case.fused, own, [x[row] for x in weights])
        assert all(torch.equal(x, y[row]) for x, y in zip(outputs, together[0], strict=True))
        # The gradient of a parameter is a sum over the batch.
        for leaf in gradients.keys() - set(case.wide):
            assert torch.equal(gradients[leaf], together[1][leaf][row]), leaf


@pytest.mark.parametrize("lengths", [None, PACKED])
def test_a_convolution_waits_for_nothing_and_replays_in_a_graph(lengths) -> None:
    x, weight, history = (t.cuda() for t in conv(lengths=lengths).tensors.values())
    offsets = owner = None
    if lengths is not None:
        offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
        owner = torch.arange(len(lengths), device="cuda").repeat_interleave(offsets.diff())

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return conv_ops.short_conv(x, weight, history, offsets, owner, None, True)

    graph, (y, final) = captured(run)
    x.mul_(2)
    graph.replay()
    with waits_for_nothing():
        again = run()
    assert torch.equal(y, again[0])
    assert torch.equal(final, again[1])


def test_past_two_to_the_31_elements() -> None:
    channels = 2048
    x = torch.zeros(1, 2**20 + 512, channels, device="cuda", dtype=torch.bfloat16)
    x[0, -3:] = torch.randn(3, channels)
    weight, history = torch.randn(channels, 4).cuda(), x.new_zeros(1, 3, channels)
    y, final = conv_ops.short_conv(x, weight, history, None, None, None, True)
    tail = x[:, -6:].clone()
    expected, _ = conv_ops.short_conv(tail, weight, history, None, None, None, True)
    assert torch.equal(y[:, -3:], expected[:, -3:])
    assert torch.equal(final, x[:, -3:])
    rows = x.view(1, -1, 16, 128)
    scale = torch.ones(128, device="cuda")
    normed = norm.gated_norm(rows, rows, scale, 1e-5)
    alone = norm.gated_norm(rows[:, -3:], rows[:, -3:], scale, 1e-5)
    assert torch.equal(normed[:, -3:], alone)


def test_a_gpu_prefers_the_kernels() -> None:
    x = torch.zeros(1, 2, 3, device="cuda", dtype=torch.bfloat16)
    reasons = (
        norm.why_no_gated_norm(x, x, "silu"), norm.why_no_residual_norm(x, x),
        mlp.why_not_gated(x, x),
        why_not_fused(x), short_conv.too_many(torch.zeros(3, 4)),
    )  # fmt: skip
    assert reasons == (None,) * 5


def test_the_loss_of_a_head_holds_no_logits() -> None:
    rows, vocab, hidden = 16384, 50304, 256
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocab, (rows,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_next_token_loss(x, weight, targets)
    loss.backward()
    whole = rows * vocab * 2
    assert torch.cuda.max_memory_allocated() - before < whole / 2
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight)]
    plain = next_token_loss(leaves[0] @ leaves[1].mT, targets)
    plain.backward()
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=0)
    assert relative_rms(x.grad, leaves[0].grad) < 2**-6
    assert relative_rms(weight.grad, leaves[1].grad) < 2**-6
