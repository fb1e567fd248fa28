import pytest
import torch
import torch.nn.functional as F

from deltarule.models import next_token_loss


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


def test_gradcheck():
    logits, targets = inputs(torch.float64, rows=(1, 7), vocab=3)
    torch.autograd.gradcheck(lambda x: next_token_loss(x, targets), logits)


def test_keeps_one_number_a_token_beside_the_logits():
    logits, targets = inputs(rows=(4, 512), vocab=1000)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        next_token_loss(logits, targets)
    beside = [x for x in kept if x.data_ptr() != logits.data_ptr()]
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
    loss = next_token_loss(logits, torch.full_like(targets, -100))
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.long), r"targets must be \[3\]"),
        (torch.zeros(3), "targets must be int64 or int32, got torch.float32"),
        (torch.tensor([0, 5, 1]), r"targets must lie in \[0, 5\) or be ignore_index=-100, got 5"),
        (torch.tensor([0, -1, 1]), "got -1"),
    ],
)
def test_bad_targets_are_named(targets, message):
    with pytest.raises(ValueError, match=message):
        next_token_loss(torch.zeros(3, 5), targets)


def test_no_tokens():
    logits = torch.zeros(1, 0, 5, requires_grad=True)
    loss = next_token_loss(logits, torch.zeros(1, 0, dtype=torch.long))
    loss.backward()
    assert loss == 0
