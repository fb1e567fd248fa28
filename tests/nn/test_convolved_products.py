"""Projections and their convolutions in one node, against PyTorch's own operations in float64."""

import pytest
import torch
import torch.nn.functional as F

from deltarule.nn import ShortConv, convolved_products, short_conv
from deltarule.nn.layout import make_layout
from promised import promised
from tolerance import assert_close


@pytest.fixture
def kernels(monkeypatch) -> None:
    """Kernels under Triton's interpreter."""
    promised("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here: see test_kept_on_gpu")
    monkeypatch.setattr(short_conv, "why_not_fused", lambda x: None)


class Layer:
    """Projections of 12 channels to q, k, v, and to a gate and six logits, and histories."""

    def __init__(self) -> None:
        sizes = 8, 16, 24, 16, 6
        self.modules = [torch.nn.Linear(12, size, bias=False) for size in sizes]
        self.convolutions = [ShortConv(size) for size in sizes[:3]]
        self.x = torch.randn(2, 37, 12, requires_grad=True)
        self.histories = [torch.randn(2, 3, size, requires_grad=True) for size in sizes[:3]]
        weights = [module.weight for module in (*self.modules, *self.convolutions)]
        self.leaves = [self.x, *weights, *self.histories]

    def run(self):
        layout = make_layout(self.x, None, None)
        return convolved_products.convolved_products(
            self.x, self.modules, self.convolutions, self.histories, layout
        )

    def exact(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """y, other products and next histories in float64, by PyTorch alone; and the leaves."""
        x, *rest = leaves = [given.detach().double().requires_grad_() for given in self.leaves]
        weights, taps, histories = rest[:5], rest[5:8], rest[8:]
        y, after = [], []
        for weight, tap, history in zip(weights, taps, histories, strict=False):
            rows = torch.cat([history, x @ weight.mT], 1).mT
            y.append(F.silu(F.conv1d(rows, tap[:, None], groups=len(tap))).mT)
            after.append(rows.mT[:, -3:])
        return [*y, *[x @ weight.mT for weight in weights[3:]], *after], leaves


def given_to(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(x.shape) for x in outputs]


@pytest.mark.usefixtures("kernels")
def test_projections_and_their_convolutions_are_one_node() -> None:
    layer = Layer()
    found = layer.run()
    outputs = [*found.y, *found.others, *found.after]
    assert {type(x.grad_fn).__name__ for x in outputs} == {"ConvolvedProductsBackward"}
    expected, leaves = layer.exact()
    for a, b in zip(outputs, expected, strict=True):
        assert_close(a, b, dtype=torch.float32)
    given = given_to(outputs)
    gradients = torch.autograd.grad(outputs, layer.leaves, given)
    exact = torch.autograd.grad(expected, leaves, [d.double() for d in given])
    for a, b in zip(gradients, exact, strict=True):
        assert_close(a, b, dtype=torch.float32, gradient=True)


@pytest.mark.usefixtures("kernels")
def test_outputs_without_a_gradient_have_none() -> None:
    layer = Layer()
    found, (expected, leaves) = layer.run(), layer.exact()
    (d_k,) = given_to([found.y[1]])
    gradients = torch.autograd.grad(found.y[1], layer.leaves, d_k, allow_unused=True)
    exact = torch.autograd.grad(expected[1], leaves, d_k.double(), allow_unused=True)
    assert gradients[4] is gradients[5] is None
    for a, b in zip(gradients, exact, strict=True):
        if b is not None:
            assert_close(a, b, dtype=torch.float32, gradient=True)


@pytest.mark.usefixtures("kernels")
def test_a_gradient_in_its_slot_is_not_copied_and_one_that_is_kept_stays(monkeypatch) -> None:
    from deltarule.ops.fused import short_conv_triton

    copied = []
    copy = short_conv_triton.lay_beside
    monkeypatch.setattr(
        short_conv_triton, "lay_beside", lambda *x: copied.append(x[1].shape[1]) or copy(*x)
    )
    layer = Layer()
    found = layer.run()
    outputs = [*found.y, *found.others]
    given = given_to(outputs)
    expected = torch.autograd.grad(outputs, layer.leaves[:9], given, retain_graph=True)
    assert copied == [16, 8]
    copied.clear()
    d_gate = given[3]
    for _ in range(2):
        given[3] = slot = found.room.slot(3, found.others[0]).copy_(d_gate)
        gradients = torch.autograd.grad(outputs, layer.leaves[:9], given, retain_graph=True)
        for a, b in zip(gradients, expected, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(slot, d_gate)
    # Six logits are filled up to eight columns in any case.
    assert copied == [8, 8]
    # Nor is a gradient written over that no backward of the products has taken.
    first, second = (found.room.slot(3, found.others[0]).fill_(i) for i in range(2))
    assert (first == 0).all()
    assert (second == 1).all()


@pytest.mark.usefixtures("kernels")
def test_modules_that_are_more_than_products_and_taps_are_called(monkeypatch) -> None:
    layer = Layer()
    # A weight for which one product is enough has it to itself.
    monkeypatch.setattr(convolved_products, "SMALL", 24 * 12 - 1)
    assert layer.run() is None
    monkeypatch.setattr(convolved_products, "SMALL", 24 * 12)
    assert layer.run() is not None
    layer.convolutions[1] = ShortConv(16, bias=True)
    assert layer.run() is None
    layer = Layer()
    layer.modules[0].register_forward_hook(lambda *_: None)
    assert layer.run() is None
    # Columns of q that no weight has would be none of the kernel's.
    layer = Layer()
    layer.modules[0], layer.convolutions[0] = torch.nn.Linear(12, 6, bias=False), ShortConv(6)
    assert layer.run() is None
