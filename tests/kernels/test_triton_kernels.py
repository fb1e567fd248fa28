"""The Triton kernels over chunks under the interpreter, against the definition: every decay."""

import math

import pytest
import torch

from kernels.interpreted import inputs_of, interpreted, on_the_cpu
from oracle import Case, check, make_case
from promised import promised
from truth import assert_causal

promised("triton")

from deltarule.ops.delta_rule.triton import passes, plan, scores, tile_sizes
from deltarule.ops.delta_rule.triton.plan import Call, new_plan

__all__ = ["on_the_cpu"]
pytestmark = [interpreted, pytest.mark.usefixtures("on_the_cpu")]

KINDS = [
    *((decay, erase, 1) for decay in ("none", "constant", "head") for erase in ("none", "tied")),
    *(("head", "tied", n) for n in (2, 3, 4)), *(("channel", "none", n) for n in (1, 3)),
    *(("channel", "tied", n) for n in (1, 2, 3, 4)),
    *((decay, "free", 1) for decay in ("none", "constant", "head", "channel")),
]  # fmt: skip
RULES = [("none", "tied"), ("head", "tied"), ("channel", "tied"), ("channel", "free")]
every_rule = pytest.mark.parametrize(("decay", "erase"), RULES)


def small(decay: str = "head", erase: str = "tied", **sizes: object) -> Case:
    """A chunk and a bit; where channels decay, of one head, which is slow."""
    one = {"heads": 1, "value_heads": 1, "key_size": 5} if decay == "channel" else {}
    defaults = {"batch": 1, "tokens": 66} | one
    return make_case(decay, erase, **defaults | sizes).to(torch.float32)


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize(("decay", "erase", "n_steps"), KINDS)
def test_every_decay_and_erase(decay: str, erase: str, n_steps: int, save: bool) -> None:
    norm = erase != "free" and n_steps % 2 == 1
    case = small(decay, erase, n_steps=n_steps, normalize_qk=norm, tokens=66 // n_steps + 3)
    check(case, "triton", save_states=save, cancels=10.0)


def of_size(rule: tuple[str, str], key_size: int, value_size: int) -> dict[str, object]:
    """More value heads than key heads; many of one number each, so that no head's luck decides."""
    heads = 16 if key_size == 1 and rule[0] == "head" else 2
    sizes = {"key_size": key_size, "value_size": value_size, "tokens": 20, "beta_max": 1.0}
    return sizes | {"heads": heads, "value_heads": 2 * heads}


CALLS = [
    *((rule, {"lengths": (3, 0, 66, 1)}) for rule in RULES),
    *((rule, of_size(rule, *size)) for rule in RULES for size in ((1, 1), (17, 70), (40, 3))),
    *((rule, {"heads": 2, "value_heads": 2}) for rule in (*RULES[:2], ("head", "none"))),
]


@pytest.mark.parametrize(("rule", "sizes"), CALLS)
def test_packed_sequences_any_sizes_and_heads(rule, sizes) -> None:
    check(small(*rule, **sizes), "triton")


@pytest.mark.parametrize(
    ("spacing", "strength"), [(1, -1e4), (2, -math.inf), (7, -1e6), (16, -math.inf), (40, -1e4)]
)
@pytest.mark.parametrize(
    ("decay", "erase", "n_steps"),
    [("head", "tied", 1), ("channel", "tied", 2), ("channel", "free", 1)],
)
def test_resets(decay, erase, n_steps, spacing, strength) -> None:
    sizes = {"tokens": 70 // n_steps, "heads": 1, "value_heads": 1}
    case = small(decay, erase, n_steps=n_steps, **sizes)
    channels = (slice(None, None, 2),) if decay == "channel" else ()
    case.tensors["log_decay"][:, ::spacing, :, *channels] = strength
    # Between resets, decays that cost those after them no digits.
    case.tensors["log_decay"][:, 5::9] = -59.0
    check(case, "triton")


@pytest.mark.parametrize("n_steps", [1, 2, 4])
def test_tiles_through_the_copy_engine_change_nothing(n_steps: int, monkeypatch) -> None:
    sizes = {"tokens": 128 // n_steps, "key_size": 16, "value_size": 16, "heads": 1}
    case = small(n_steps=n_steps, **sizes, value_heads=1)
    check(case, "triton")
    whole = case.run("triton")
    monkeypatch.setattr(plan, "full_tiles", lambda *_: False)
    assert all(map(torch.equal, whole, case.run("triton")))


@every_rule
@pytest.mark.parametrize("value_heads", [2, 4])
def test_float16_within_the_yardstick(decay: str, erase: str, value_heads: int) -> None:
    size = 70 if decay == "head" else 16
    sizes = {"tokens": 70, "key_size": size, "value_size": size, "heads": 2, "beta_max": 1.0}
    case = make_case(decay, erase, batch=1, **sizes, value_heads=value_heads)
    check(case.to(torch.float16), "triton")


@every_rule
def test_any_strides(decay: str, erase: str) -> None:
    case = small(decay, erase)
    names = [name for name in ("beta", "log_decay") if case.tensors[name] is not None]
    turned = {
        name: case.tensors[name].transpose(1, -1).contiguous().transpose(1, -1) for name in names
    }
    check(case.changed(**turned), "triton")


def check_causal(case: Case) -> None:
    """What is changed in the middle of a block, or where one begins; decays are of every size."""
    assert_causal(case, lambda case: case.run("triton").o, (37, 48), (0.5, 30.0, 1e6))


@pytest.mark.parametrize(
    ("decay", "erase", "n_steps"),
    [("head", "tied", 1), ("channel", "none", 1), ("channel", "tied", 2), ("channel", "free", 1)],
)
def test_nothing_comes_from_the_future(decay, erase, n_steps) -> None:
    check_causal(small(decay, erase, n_steps=n_steps, tokens=60))


# ---- scores that the scans take -----------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{}, {"lengths": (0, 40, 33)}, {"tokens": 128, "batch": 1}])
@pytest.mark.parametrize(
    ("erase", "normalize_qk"), [("none", False), ("none", True), ("tied", True)]
)
def test_scores_that_the_scans_take(monkeypatch, erase, normalize_qk, sizes) -> None:
    monkeypatch.setattr(scores, "SCORED_TYPES", (torch.float32,))
    sizes = {"key_size": 16, "value_size": 16, "dtype": torch.float32, **sizes}
    case = make_case("none", erase, normalize_qk=normalize_qk, **sizes)
    for name in ("q", "k"):
        # Of many norms, by which scores are scaled.
        case.tensors[name] *= 0.5 + torch.rand(case.tensors[name].shape[:-1])[..., None]
    inputs = inputs_of(case)
    assert "scores" not in passes.kept_shapes(Call(inputs, new_plan(inputs)), True)
    for save in (True, False):
        check(case, "triton", save_states=save)


@pytest.mark.parametrize(
    ("architecture", "changed", "taken"),
    [
        (0, {}, True), (0, {"value_size": 128, "key_size": 128}, True),
        (0, {"decay": "head"}, False),
        (0, {"n_steps": 2}, False), (0, {"value_size": 129}, False), (0, {"key_size": 129}, False),
        (0, {"dtype": torch.float16}, False), (0, {"dtype": torch.float32}, False),
        (80, {}, False), (90, {}, True), (100, {}, False), (120, {}, False),
    ],
)  # fmt: skip
def test_which_scores_the_scans_take_and_where(architecture, changed, taken, monkeypatch) -> None:
    if architecture:
        monkeypatch.setattr(tile_sizes, "INTERPRETED", architecture)
    given = {"decay": "none", "dtype": torch.bfloat16, "tokens": 3, **changed}
    inputs = inputs_of(make_case(**given))
    assert scores.scans_score(inputs, new_plan(inputs)) == taken
