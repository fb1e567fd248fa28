"""What one registration makes of a named tuple and two functions: shown on a toy."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from deltarule.ops.operators import Operator
from deltarule.ops.registration import Backward, Rules

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


def test_the_operators_keep_their_promises() -> None:
    given = arguments()
    assert set(opcheck(scaled.operator, given).values()) == {"SUCCESS"}
    assert set(opcheck(scaled.operator, (*given[:2], None, *given[3:])).values()) == {"SUCCESS"}
    x, _, weight = (t.detach() for t in given[:3])
    rest = (None, None, weight, *given[3:], [True, True])
    for gradients in ((x, x), (None, x), (x, None)):
        checked = opcheck(scaled.backward_operator, (*gradients, x, *rest))
        assert set(checked.values()) == {"SUCCESS"}


def test_only_what_is_wanted_is_asked_for() -> None:
    x, y, weight, *numbers = arguments(x=False, weight=False)
    ran.clear()
    scaled(x, y, weight, *numbers)[1].sum().backward()
    assert ran == ["forward", "backward [True, False]"]
    assert x.grad is None
    assert y.grad is not None


def test_functions_transform_as_the_body_does() -> None:
    x, y, weight, *numbers = (t.detach() if isinstance(t, Tensor) else t for t in arguments())
    of = lambda run: lambda w: run(x[0], y[0], w, *numbers)[1].square().sum()  # noqa: E731
    found = torch.vmap(torch.func.grad(of(scaled)))(weight)
    torch.testing.assert_close(found, torch.vmap(torch.func.grad(of(plain)))(weight))


def test_there_is_one_derivative() -> None:
    given = arguments()
    for run in (scaled, scaled.operator):
        (first,) = torch.autograd.grad(run(*given)[1].sum(), given[0], create_graph=True)
        with pytest.raises(NotImplementedError, match="first reverse-mode derivative only"):
            first.sum().backward()
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(given[0].detach(), given[1].detach())
        with pytest.raises(NotImplementedError, match="forward-mode"):
            scaled(x, *given[1:])


def test_what_is_kept_is_what_the_backward_is_given() -> None:
    given, kept = arguments(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        s, _ = scaled(*given)
    assert [x.data_ptr() for x in kept] == [s.data_ptr(), given[2].data_ptr()]
