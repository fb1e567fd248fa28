"""Calls that go straight to recorded launches: which may, and that nothing else changes."""

import pytest
import torch

from deltarule import delta_rule, dplr
from deltarule.ops.delta_rule import repeated as module
from deltarule.ops.delta_rule.implementations import backend_of, recurrence
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.repeated import eager_key, repeated
from deltarule.ops.delta_rule.triton import passes
from deltarule.ops.dispatch import ONCE
from opchecked import Registered


class Other(torch.Tensor):
    """A tensor that may be more than memory."""


@pytest.fixture
def on_gpu(monkeypatch):
    """Tensors of the CPU taken for those of a GPU, where something was recorded."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(module, "recordings", dict.fromkeys(["another"]))


def key_of(*changed: torch.Tensor, **changes):
    q, k, v = (*changed, *torch.zeros(3, 1, 4, 2, 8).unbind())[:3]
    given = {
        "n_steps": 1, "scale": None, "normalize_qk": False, "batch_invariant": False,
        "impl": "auto", **changes,
    }  # fmt: skip
    tensors = q, k, v, torch.zeros(1, 4, 2), *[None] * 5
    *options, impl = given.values()
    return eager_key(tensors, tuple(options), impl, True)


def test_on_the_cpu_there_is_no_key(monkeypatch) -> None:
    monkeypatch.setitem(delta_rule.__globals__["recurrence_of"].__globals__, "eager_key", None)
    q, k, v = torch.zeros(3, 1, 4, 2, 8).unbind()
    assert not delta_rule(q, k, v, beta=None).o.any()


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    "changes",
    [{"n_steps": 1.0}, {"n_steps": True}, {"scale": 1}, {"scale": True}, {"normalize_qk": 1},
     {"scale": torch.tensor(1.0)}, {"batch_invariant": 0}, {"impl": "torch"}, {"impl": []}],
    ids=str,
)  # fmt: skip
def test_numbers_that_are_not_plain_have_none(changes) -> None:
    assert key_of(scale=1.0, impl="triton") is not None
    assert key_of(**changes) is None


@pytest.mark.usefixtures("on_gpu")
def test_tensors_that_are_more_have_none() -> None:
    x = torch.zeros(1, 4, 2, 8)
    assert key_of(x, torch.nn.Parameter(x, requires_grad=False)) is not None
    assert key_of(x, x.as_subclass(Other)) is None
    assert key_of(x, None) is not None
    assert key_of([1.0]) is None
    assert key_of(x, [1.0]) is None


@pytest.mark.usefixtures("on_gpu")
def test_where_somebody_watches_there_is_none(monkeypatch) -> None:
    x = torch.zeros(1, 4, 2, 8)
    seen = []
    torch.func.vmap(lambda x: seen.append(key_of(x[None])) or x)(x)
    torch.func.grad(lambda x: seen.append(key_of(x)) or x.sum())(x)
    with Registered():
        seen.append(key_of(x))
    with torch.device("cpu"):
        seen.append(key_of(x))
    with torch.autograd.forward_ad.dual_level():
        seen.append(key_of(x))
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        seen.append(key_of(x))
    assert key_of(x) is not None
    assert seen == [None] * 6


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    "change",
    [lambda x: x.double(), lambda x: x[:, :2], lambda x: x.mT.contiguous().mT,
     lambda x: x[:, :, :1]],
)  # fmt: skip
def test_keys_tell_types_shapes_and_strides_apart(change) -> None:
    x = torch.zeros(1, 4, 2, 8)
    assert key_of(x, x.clone()).key == key_of(x, x).key
    assert key_of(x, change(x)).key != key_of(x, x).key
    assert key_of(x, scale=1.0).key != key_of(x, scale=2.0).key != key_of(x).key


OPTIONS = 1, None, False, False


def test_without_a_recording_there_is_nothing_to_repeat(on_gpu, monkeypatch) -> None:
    tensors = [*torch.zeros(3, 1, 4, 2, 8).unbind(), *[None] * 6]
    for _ in range(2):
        key = key_of(*tensors[:3])
        for known in ({}, {key.key: None}, {key.key: ONCE}):
            monkeypatch.setattr(module, "recordings", known or {"another": None})
            assert repeated(key, tensors, OPTIONS) is None
        tensors[0].requires_grad_()
    assert eager_key(tensors, OPTIONS, "auto", False) is None
    monkeypatch.setattr(module, "recordings", {})
    assert key_of() is None


class Recorded:
    """As a recording; None is what one says that leaves the launch to Triton."""

    def __init__(self, *outputs: torch.Tensor) -> None:
        self.outputs, self.calls, self.backward = outputs or None, 0, {}

    def repeated(self, key):
        self.calls += 1
        return self.outputs


@pytest.mark.parametrize("operator", [delta_rule, dplr])
def test_a_recording_takes_the_place_of_the_rest(operator, on_gpu, monkeypatch) -> None:
    q, k, v = torch.randn(3, 1, 4, 2, 8).unbind()
    gates = {"beta": torch.rand(1, 4, 2)} if operator is delta_rule else {"a": q, "b": k}
    expected = operator(q, k, v, **gates)
    o, state = torch.zeros(2, 3)
    found = Recorded(o, state)
    inputs = []
    known = lambda *x: inputs.append(x[:-1]) or (found, None)  # noqa: E731
    monkeypatch.setattr(passes.forward_stages, "recording", known)
    assert torch.equal(operator(q, k, v, **gates).o, expected.o)
    assert len(inputs) == 1
    again = operator(q, k, v, **gates)
    assert again.o is o
    assert again.final_state is state
    assert operator(q, k, v, **gates, return_state=False).final_state is None
    # Another call is checked as ever.
    with pytest.raises(ValueError, match="k must be"):
        operator(q, k[:, :2], v, **gates)
    found.outputs = None
    assert torch.equal(operator(q, k, v, **gates).o, expected.o)


@pytest.mark.parametrize("operator", [delta_rule, dplr])
def test_where_a_backward_may_follow_it_finds_what_the_recording_saved(
    operator, on_gpu, monkeypatch
) -> None:
    q, k, v = torch.randn(3, 1, 4, 2, 8).unbind()
    gates = {"beta": torch.rand(1, 4, 2)} if operator is delta_rule else {"a": q, "b": k / 8}
    leaves = [x.requires_grad_() for x in (q, v)]
    expected = operator(q, k, v, **gates, impl="torch")
    exact = torch.autograd.grad(expected.o.square().sum(), leaves)
    found, asked = Recorded(), []
    known = lambda *x: asked.append(x[-1]) or (found, None)  # noqa: E731
    monkeypatch.setattr(passes.forward_stages, "recording", known)
    backend = backend_of("torch")
    monkeypatch.setattr(recurrence, "backend_of", lambda name: backend)
    operator(q, k, v, **gates)
    assert asked == [True]
    assert found in module.recordings.values()
    own = gates.get("beta"), *(gates.get(x) for x in "ab"), *[None] * 3
    inputs = Inputs(q, k, v, *own, scale=8**-0.5)
    for outputs in (backend.forward(inputs, True), None):
        found.outputs = outputs
        output = operator(q, k, v, **gates)
        gradients = torch.autograd.grad(output.o.square().sum(), leaves)
        assert torch.equal(output.o, expected.o)
        assert all(map(torch.equal, gradients, exact))
    assert found.calls == 2
    # What keeps no states, or has no gradient, is another matter.
    operator(q, k, v, **gates, save_states=False)
    with torch.no_grad():
        operator(q, k, v, **gates)
    assert found.calls == 2
    assert asked == [True, False]


def test_a_constant_decay_has_its_own_gradient(on_gpu, monkeypatch) -> None:
    q, k, v = torch.randn(3, 1, 4, 2, 8).unbind()
    decay = -torch.rand(2)
    decay.requires_grad_()
    monkeypatch.setattr(passes.forward_stages, "recording", lambda *x: (Recorded(), None))
    for _ in range(3):
        delta_rule(q, k, v, beta=None, log_decay=decay).o.sum().backward()
    assert list(module.recordings) == ["another"]


class Unread(dict):
    """A compiler guards on what it reads, and compiles again when that has changed."""

    def __len__(self) -> int:
        raise AssertionError("compiled code would depend on what was recorded")


def test_compiled_code_does_not_depend_on_what_was_recorded(monkeypatch) -> None:
    monkeypatch.setattr(module, "recordings", Unread())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert key_of() is None
