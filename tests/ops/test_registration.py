"""What one registration makes of a named tuple and two functions: shown on a toy."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from deltarule.ops.operators import Operator
from deltarule.ops.registration import Backward, Rules
from nodes import kept

ran: list[str] = []


class Scaled(NamedTuple):
    """s = x + y, z = factor * s * weight."""

    x: Tensor
    y: Tensor
    weight: Tensor | None
    factor: float


def forward(inputs: Scaled, times: int) -> tuple[Tensor, Tensor]:
    ran.append("forward")
    s = inputs.x + inputs.y
    return s, inputs.factor * times * s * (1 if inputs.weight is None else inputs.weight)


def backward(given: Backward[Scaled], times: int):
    (d_s, d_z), (s,), wanted, inputs, _ = given
    ran.append(f"backward {wanted}")
    assert inputs.x is inputs.y is None
    d_s = torch.zeros_like(s) if d_s is None else d_s
    d_z = torch.zeros_like(s) if d_z is None else d_z
    weight = torch.ones_like(s) if inputs.weight is None else inputs.weight
    d_weight = inputs.factor * times * d_z * s if inputs.weight is not None and wanted[1] else None
    return d_s + inputs.factor * times * weight * d_z, d_weight


def fake(inputs: Scaled, times: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(inputs.x), torch.empty_like(inputs.x)


scaled = Operator(
    "toy_scaled", Scaled, forward, backward, fake, returned=2, options={"times": int},
    rules=Rules(2, (0,), ("x", "weight"), alike={"y": "x"}, forgotten=("x", "y")),
)  # fmt: skip


def arguments(**given: bool) -> tuple:
    x, y, weight = torch.randn(3, 4, 5, dtype=torch.float64).unbind()
    tensors = {"x": x.clone(), "y": y.clone(), "weight": weight.clone()}
    return (*(t.requires_grad_(given.get(n, True)) for n, t in tensors.items()), 0.5, 3)


def plain(x: Tensor, y: Tensor, weight: Tensor | None, factor: float, times: int):
    s = x + y
    return s, factor * times * s * (1 if weight is None else weight)


def test_the_fields_are_the_schema() -> None:
    assert str(scaled.operator._schema) == (
        "deltarule::toy_scaled(Tensor x, Tensor y, Tensor? weight, float factor, SymInt times) -> "
        "(Tensor, Tensor)"
    )


@pytest.mark.parametrize("used", [(1, 1), (1, 0), (0, 1)])
def test_gradients_in_every_form_are_those_of_plain_pytorch(used) -> None:
    given = arguments()

    def loss(run, *tensors):
        s, z = run(*tensors, *given[3:])
        return used[0] * s.sin().sum() + used[1] * z.sin().sum() if all(used) else (
            s if used[0] else z
        ).sin().sum()  # fmt: skip

    leaves = [x for i, x in enumerate(given[:3]) if i < 2 or used[1]]
    expected = torch.autograd.grad(loss(plain, *given[:3]), leaves)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: loss(scaled, *x), fullgraph=True, backend="aot_eager")
    for run in (lambda *x: loss(scaled, *x), lambda *x: loss(scaled.operator, *x), compiled):
        found = torch.autograd.grad(run(*given[:3]), leaves)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y)


def test_only_what_is_wanted_is_asked_for() -> None:
    x, y, weight, *numbers = arguments(x=False, weight=False)
    ran.clear()
    scaled(x, y, weight, *numbers)[1].sum().backward()
    assert ran == ["forward", "backward [True, False]"]
    assert x.grad is None
    assert y.grad is not None


def test_what_is_kept_is_what_the_backward_is_given() -> None:
    given = arguments()
    with kept() as tensors:
        s, _ = scaled(*given)
    assert [x.data_ptr() for x in tensors] == [s.data_ptr(), given[2].data_ptr()]
