import pytest
import torch
import torch.nn.functional as F

from deltarule.models import linear_next_token_loss, next_token_loss
from deltarule.ops.fused import cross_entropy
from nodes import kept


def inputs(dtype=torch.float32, rows=(3, 700), vocab=11):
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(*rows, vocab, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(vocab, rows, generator=generator)
    targets[0, :5] = -100
    return logits, targets


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_cross_entropy_in_value_and_gradient(dtype):
    logits, targets = inputs(dtype)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), targets.flatten())
    loss = next_token_loss(logits, targets)
    (3 * loss).backward()
    (3 * expected).backward()
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3}[dtype]
    torch.testing.assert_close(loss.double(), expected, rtol=min(tolerance, 1e-6), atol=0)
    assert (logits.grad - exact.grad).norm() <= tolerance * exact.grad.norm()
    assert not logits.grad[0, :5].any()


def test_keeps_one_number_a_token_beside_the_logits():
    logits, targets = inputs(rows=(4, 512), vocab=1000)
    with kept() as tensors:
        next_token_loss(logits, targets)
    beside = [x for x in tensors if x.data_ptr() != logits.data_ptr()]
    assert sum(x.numel() for x in beside) <= 3 * targets.numel()


def test_other_ignored_index():
    logits, targets = inputs()
    targets[0, :5] = 7
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=7)
    torch.testing.assert_close(next_token_loss(logits, targets, ignore_index=7), expected)


def test_infinite_logits_of_impossible_tokens():
    logits = torch.tensor([[0.0, float("-inf"), 1.0]], requires_grad=True)
    next_token_loss(logits, torch.tensor([0])).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] == 0


def test_nothing_to_count_is_zero():
    logits, targets = inputs()
    empty, none = torch.zeros(1, 0, 5, requires_grad=True), torch.zeros(1, 0, dtype=torch.long)
    x, weight, of_head = head()
    losses = (
        next_token_loss(logits, torch.full_like(targets, -100)), next_token_loss(empty, none),
        linear_next_token_loss(x, weight, torch.full_like(of_head, -100)),
    )  # fmt: skip
    for loss in losses:
        loss.backward()
        assert loss == 0
    for leaf in (logits, x, weight):
        assert not leaf.grad.any()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.long), r"targets must be \[3\]"),
        (torch.zeros(3), "targets must be int64 or int32, got torch.float32"),
        (None, "targets must be a tensor, got NoneType"),
        (torch.tensor([0, 5, 1]), r"targets must lie in \[0, 5\) or be ignore_index=-100, got 5"),
        (torch.tensor([0, -1, 1]), "got -1"),
    ],
)
def test_bad_targets_are_named(targets, message):
    with pytest.raises(ValueError, match=message):
        next_token_loss(torch.zeros(3, 5), targets)


def head(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in ((3, 20, 5), (11, 5))
    )
    targets = torch.randint(11, (3, 20), generator=generator)
    targets[0, :5] = -100
    return x, weight, targets


@pytest.mark.parametrize("most_logits", [2**27, 70, 1])
def test_a_head_without_logits_equals_the_loss_of_them(most_logits, monkeypatch):
    monkeypatch.setattr(cross_entropy, "MOST_LOGITS", most_logits)
    x, weight, targets = head()
    expected = F.cross_entropy(F.linear(x, weight).flatten(0, 1), targets.flatten())
    exact = torch.autograd.grad(3 * expected, (x, weight))
    loss = linear_next_token_loss(x, weight, targets)
    (3 * loss).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for leaf, gradient in zip((x, weight), exact, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-10, atol=1e-14)


def test_a_head_keeps_its_gradients_only(monkeypatch):
    monkeypatch.setattr(cross_entropy, "MOST_LOGITS", 22)
    x, weight, targets = head(torch.float32)
    with kept() as tensors:
        linear_next_token_loss(x, weight, targets)
    beside = [t for t in tensors if t.data_ptr() not in (x.data_ptr(), weight.data_ptr())]
    assert sum(t.numel() for t in beside) == x.numel() + weight.numel() + 1
    assert linear_next_token_loss(x.detach(), weight.detach(), targets).isfinite()


def test_a_head_under_autocast_multiplies_in_its_dtype():
    x, weight, targets = head(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_next_token_loss(x, weight, targets)
        expected = next_token_loss(F.linear(x, weight), targets)
    loss.backward()
    assert loss.dtype == x.grad.dtype == weight.grad.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_wrong_heads_are_named():
    x, weight, targets = head()
    with pytest.raises(ValueError, match=r"weight must be \[vocab_size, 5\].*got \[5, 11\]"):
        linear_next_token_loss(x, weight.mT, targets)
    with pytest.raises(ValueError, match=r"targets must be \[3, 20\], that of x"):
        linear_next_token_loss(x, weight, targets[0])
    with pytest.raises(ValueError, match=r"weight must be torch\.float64 like x outside autocast"):
        linear_next_token_loss(x, weight.float(), targets)
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 11\)"):
        linear_next_token_loss(x, weight, targets + 11)
