"""The registered operators keep PyTorch's contracts: compile, vmap, func."""

import pytest
import torch
import torch._dynamo.testing

from deltarule import delta_rule
from deltarule.ops.dispatch import are_plain_eager
from opchecked import Registered
from oracle import make_case


@pytest.mark.parametrize("lengths", [None, (5, 0, 15)])
def test_compiles_without_a_break_for_any_length(lengths: tuple[int, ...] | None) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda case: tuple(case.run("torch")), fullgraph=True, backend=counter, dynamic=True
    )
    for tokens in (20, 21, 35):
        packed = lengths and (*lengths, tokens)
        case = make_case("channel", "tied", tokens=tokens, lengths=packed, dtype=torch.float32)
        o, state = compiled(case)
        expected = case.run("torch")
        assert torch.equal(o, expected.o)
        assert torch.equal(state, expected.final_state)
    assert counter.frame_count <= 2


def test_a_gradient_is_mapped_along_any_of_its_axes() -> None:
    case = make_case("head", "tied", tokens=8, heads=1, value_heads=1)
    v = case.tensors["v"]
    o, backward = torch.func.vjp(lambda v: case.run("torch", case.tensors | {"v": v}).o, v)
    gradients = torch.randn(*o.shape, 3, dtype=o.dtype)
    (found,) = torch.vmap(backward, in_dims=-1)(gradients)
    torch.testing.assert_close(found, torch.stack([backward(d)[0] for d in gradients.unbind(-1)]))


def test_only_dual_arguments_are_refused() -> None:
    q, k, v = torch.randn(3, 1, 4, 1, 2).unbind()
    constant = lambda x: x * delta_rule(q, k, v, beta=None).o.sum()  # noqa: E731
    _, tangent = torch.func.jvp(constant, (torch.ones(()),), (torch.ones(()),))
    torch.testing.assert_close(tangent, delta_rule(q, k, v, beta=None).o.sum())


@pytest.mark.parametrize("offsets", [[0, 3, 5], [0, 8, 3], [0, 3, 50], [1, 9]])
def test_wrong_offsets_are_refused_in_compiled_code_too(offsets: list[int]) -> None:
    torch._dynamo.reset()
    q, k, v = torch.randn(3, 1, 9, 1, 2).unbind()
    run = torch.compile(
        lambda offsets: delta_rule(q, k, v, beta=None, cu_seqlens=offsets).o,
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to T = 9"):
        run(torch.tensor(offsets))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is:DeprecationWarning")
def test_subclasses_modes_and_tracing_get_the_operator() -> None:
    class Kind(torch.Tensor):
        pass

    x = torch.zeros(2)
    assert are_plain_eager((x, None, torch.nn.Parameter(x)))
    assert not are_plain_eager((x, x.as_subclass(Kind)))
    with torch.device("cpu"):
        assert not are_plain_eager((x,))
    with Registered():
        assert not are_plain_eager((x,))
    assert not torch.vmap(lambda y: y + float(are_plain_eager((x,))))(x).any()
    seen = []
    torch.jit.trace(lambda y: seen.append(are_plain_eager((x,))) or y + 1, x, check_trace=False)
    assert seen == [False]
