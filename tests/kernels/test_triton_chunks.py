"""The Triton kernels over chunks under the interpreter: decay none or per head."""

import math

import pytest
import torch

from oracle import Case, make_case, run_module, weights, with_gradients
from promised import promised
from tolerance import assert_close, assert_close_to_yardstick

promised("triton")

from deltarule import pack
from deltarule.ops.delta_rule import chunked
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import passes, stages, tile_sizes
from deltarule.ops.delta_rule.triton.plan import new_plan

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here: see test_on_gpu"
)
NAMES = ("q", "k", "v", "beta", "a", "b", "log_decay", "initial_state")
KINDS = [(decay, *e) for decay in ("none", "constant", "head") for e in (("none", 1), ("tied", 1))]


def inputs_of(case: Case) -> Inputs:
    x = case.tensors
    log_decay = x["log_decay"]
    if log_decay is not None and log_decay.ndim == 1:
        log_decay = log_decay.expand(*x["q"].shape[:2], -1)
    return Inputs(
        x["q"], x["k"], x["v"], x["beta"], x["a"], x["b"], log_decay, x["initial_state"],
        None if case.lengths is None else pack(case.lengths), case.n_steps,
        x["q"].shape[-1] ** -0.5, case.normalize_qk, False,
    )  # fmt: skip


def check(case: Case, *, save: bool = True) -> None:
    """Outputs and every gradient against the definition in float64."""
    d_o, d_state = (x.float() for x in weights(case))
    exact, expected = with_gradients(
        case.to(torch.float64), "reference", d_o.double(), d_state.double()
    )
    inputs = inputs_of(case)
    o, final_state, saved = passes.forward(inputs, save)
    assert_close(o, exact.o, dtype=torch.float32, name="o")
    assert_close(final_state, exact.final_state, dtype=torch.float32, name="final_state")
    gradients = passes.backward(d_o, d_state, inputs, saved)
    for name, gradient in zip(NAMES, gradients, strict=True):
        if gradient is None:
            assert name not in case.present()
            continue
        if name == "log_decay" and case.tensors[name].ndim == 1:
            gradient = gradient.sum((0, 1))
        assert_close(gradient, expected[name], dtype=torch.float32, gradient=True, name=name)


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize(("decay", "erase", "n_steps"), KINDS)
def test_equals_the_definition(decay: str, erase: str, n_steps: int, save: bool) -> None:
    check(make_case(decay, erase, n_steps=n_steps, batch=1, dtype=torch.float32), save=save)


@pytest.mark.parametrize(("decay", "erase"), [("none", "tied"), ("head", "tied"), ("head", "none")])
def test_one_value_head_for_each_key_head(decay: str, erase: str) -> None:
    heads = {"heads": 2, "value_heads": 2}
    check(make_case(decay, erase, batch=1, **heads, dtype=torch.float32))


@pytest.mark.parametrize("n_steps", [2, 3, 4])
def test_steps_without_copies(n_steps: int) -> None:
    check(make_case(tokens=40, n_steps=n_steps, batch=1, normalize_qk=True, dtype=torch.float32))


def test_full_tiles_go_through_the_copy_engine() -> None:
    check(make_case(tokens=128, batch=2, key_size=16, value_size=16, dtype=torch.float32))


@pytest.mark.parametrize("n_steps", [1, 2, 4])
def test_the_copy_engine_changes_nothing(n_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(tokens=128 // n_steps, n_steps=n_steps, key_size=16, value_size=16)
    inputs = inputs_of(case.to(torch.float16))

    def both() -> list[torch.Tensor]:
        o, final, saved = passes.forward(inputs, True)
        gradients = passes.backward(o, final, inputs, saved)
        return [o, final, *(x for x in gradients if x is not None)]

    whole = both()
    monkeypatch.setattr(stages, "full_tiles", lambda *_: False)
    assert all(torch.equal(x, y) for x, y in zip(whole, both(), strict=True))


@pytest.mark.parametrize("sizes", [{}, {"lengths": (0, 40, 33)}, {"tokens": 128, "batch": 1}])
@pytest.mark.parametrize(
    ("erase", "normalize_qk"), [("none", False), ("none", True), ("tied", True)]
)
def test_scores_that_the_scans_take(
    monkeypatch: pytest.MonkeyPatch, erase: str, normalize_qk: bool, sizes: dict
) -> None:
    monkeypatch.setattr(stages, "SCORED_TYPES", (torch.float32,))
    sizes = {"key_size": 16, "value_size": 16, "dtype": torch.float32, **sizes}
    case = make_case("none", erase, normalize_qk=normalize_qk, **sizes)
    for name in ("q", "k"):
        # Of many norms, by which scores are scaled.
        case.tensors[name] *= 0.5 + torch.rand(case.tensors[name].shape[:-1])[..., None]
    assert "scores" not in passes.kept_shapes(inputs_of(case), new_plan(inputs_of(case)), True)
    for save in (True, False):
        check(case, save=save)


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True), ({"value_size": 128, "key_size": 128}, True), ({"decay": "head"}, False),
        ({"n_steps": 2}, False), ({"value_size": 129}, False), ({"key_size": 129}, False),
        ({"dtype": torch.float16}, False), ({"dtype": torch.float32}, False),
    ],
)  # fmt: skip
def test_which_scores_the_scans_take(changed: dict, taken: bool) -> None:
    case = make_case(**{"decay": "none", "dtype": torch.bfloat16, "tokens": 3, **changed})
    assert stages.scans_score(inputs_of(case), new_plan(inputs_of(case))) == taken


@pytest.mark.parametrize(
    ("architecture", "taken"), [(80, False), (90, True), (100, False), (120, False)]
)
def test_where_the_scans_take_scores(
    monkeypatch: pytest.MonkeyPatch, architecture: int, taken: bool
) -> None:
    monkeypatch.setattr(tile_sizes, "INTERPRETED", architecture)
    inputs = inputs_of(make_case("none", dtype=torch.bfloat16, tokens=3))
    assert stages.scans_score(inputs, new_plan(inputs)) == taken


@pytest.mark.parametrize("decay", ["none", "head"])
def test_packed_sequences(decay: str) -> None:
    check(make_case(decay, lengths=(3, 0, 70, 1, 64), dtype=torch.float32))


@pytest.mark.parametrize(("key_size", "value_size"), [(1, 1), (17, 70)])
def test_any_size(key_size: int, value_size: int) -> None:
    sizes = {"key_size": key_size, "value_size": value_size}
    check(make_case("none", tokens=5, **sizes, beta_max=1.0, dtype=torch.float32))


@pytest.mark.parametrize("reset", [-1e4, -1e6, -math.inf])
@pytest.mark.parametrize("spacing", [1, 2, 7, 40])
def test_resets(spacing: int, reset: float) -> None:
    case = make_case(tokens=70, batch=1, heads=1, value_heads=1, dtype=torch.float32)
    case.tensors["log_decay"][:, ::spacing] = reset
    # Between resets, decays that cost those after them no digits.
    case.tensors["log_decay"][:, 5::9] = -59.0
    check(case)


def test_float16() -> None:
    case = make_case(tokens=70, batch=1, beta_max=1.0).to(torch.float16)
    exact = case.to(torch.float64).run("reference")
    yardstick = run_module(chunked, case, chunk_size=64, matmul_dtype=torch.float16)
    o, final_state, _ = passes.forward(inputs_of(case), False)
    assert_close_to_yardstick(o, exact.o, yardstick.o, name="o")
    assert_close_to_yardstick(
        final_state, exact.final_state, yardstick.final_state, dtype=torch.float16
    )


@pytest.mark.parametrize("value_heads", [2, 4])
@pytest.mark.parametrize(("erase", "n_steps"), [("none", 1), ("tied", 1), ("tied", 2)])
def test_float16_gradients(erase: str, n_steps: int, value_heads: int) -> None:
    sizes = {"tokens": 70, "batch": 1, "key_size": 70, "value_size": 70}
    sizes |= {"heads": 2, "value_heads": value_heads}
    case = make_case("head", erase, n_steps=n_steps, **sizes, beta_max=1.0).to(torch.float16)
    d_o, d_state = weights(case)
    d_o = d_o.half().double()
    _, expected = with_gradients(case.to(torch.float64), "reference", d_o, d_state)
    leaves = {name: case.tensors[name].detach().requires_grad_() for name in case.present()}
    own = run_module(chunked, case.changed(**leaves), chunk_size=64, matmul_dtype=torch.float16)
    loss = (own.o.double() * d_o).sum() + (own.final_state * d_state).sum()
    yardsticks = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    inputs = inputs_of(case)
    saved = passes.forward(inputs, True)[2]
    gradients = passes.backward(d_o.half(), d_state.float(), inputs, saved)
    for name, x in zip(NAMES, gradients, strict=True):
        if x is not None:
            bars = {"dtype": torch.float16, "gradient": True, "name": name}
            assert_close_to_yardstick(x, expected[name], yardsticks[name], **bars)


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "log_decay"])
def test_the_past_does_not_change_with_the_future(name: str) -> None:
    case, at = make_case(tokens=70, batch=1, dtype=torch.float32), 37
    before = passes.forward(inputs_of(case), False)[0]
    changed = case.tensors[name].clone()
    changed[:, at:] = changed[:, at:] * 3 - 1
    after = passes.forward(inputs_of(case.changed(**{name: changed})), False)[0]
    assert torch.equal(before[:, :at], after[:, :at])
    assert not torch.equal(before[:, at:], after[:, at:])


def test_strided_gates_are_read_where_they_are() -> None:
    case = make_case(tokens=70, dtype=torch.float32)
    turned = {
        name: case.tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
        for name in ("beta", "log_decay")
    }
    check(case.changed(**turned))
