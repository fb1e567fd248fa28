"""What holds for every implementation, whatever it computes: DESIGN's properties."""

import pytest
import torch

from deltarule.ops.delta_rule.implementations import IMPLEMENTATIONS
from oracle import make_case, weights, with_gradients
from tolerance import assert_close, relative_rms

# On a GPU test_on_gpu holds Triton to the same.
IMPLS = [name for name in IMPLEMENTATIONS if name not in ("triton", "gluon")]
KINDS = [
    ("none", "tied"),
    ("head", "none"),
    ("head", "tied"),
    ("channel", "tied"),
    ("channel", "free"),
]
TIMED = ("q", "k", "v", "beta", "a", "b", "log_decay")

every_impl = pytest.mark.parametrize("impl", IMPLS)
every_kind = pytest.mark.parametrize(("decay", "erase"), KINDS)


@every_impl
@every_kind
def test_empty_steps_change_nothing(impl: str, decay: str, erase: str) -> None:
    case = make_case(decay, erase, tokens=40)
    padded = {}
    for name in TIMED:
        x = case.tensors[name]
        if x is not None:
            zeros = torch.zeros_like(x[:, :7])
            padded[name] = torch.cat([zeros, x, zeros], 1)
    out, expected = case.changed(**padded).run(impl), case.run(impl)
    assert_close(out.o[:, 7:47], expected.o)
    assert_close(out.final_state, expected.final_state)


@every_impl
@every_kind
@pytest.mark.parametrize("batch", [2, 9])
def test_a_row_alone_equals_the_row_in_a_batch(
    impl: str, decay: str, erase: str, batch: int
) -> None:
    case = make_case(decay, erase, batch=batch, tokens=100, heads=1, value_heads=1, key_size=16)
    case = case.to(torch.float32)
    d_o, d_state = weights(case)
    together, gradients = with_gradients(case, impl, d_o, d_state)
    for i in (0, batch - 1):
        row = slice(i, i + 1)
        one = case.changed(**{name: case.tensors[name][row] for name in case.present()})
        alone, own = with_gradients(one, impl, d_o[row], d_state[row])
        assert torch.equal(alone.o, together.o[row])
        assert torch.equal(alone.final_state, together.final_state[row])
        for name, gradient in own.items():
            assert torch.equal(gradient, gradients[name][row]), name


@every_impl
def test_a_long_sequence_does_not_drift(impl: str) -> None:
    if impl == "reference":
        pytest.skip("the definition needs minutes for it")
    case = make_case(
        "head", "tied", batch=1, tokens=20_000, heads=1, value_heads=1, dtype=torch.float32
    )
    exact = case.to(torch.float64).run(impl)
    assert relative_rms(case.run(impl).final_state, exact.final_state) <= 1e-6
