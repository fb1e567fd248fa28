"""Values that are hard to compute, and every size, on a CUDA device against the definition."""

import pytest
import torch
import torch.nn.functional as F

import truth
from oracle import Case
from oracle import check as held_to_the_definition
from truth import Kind

pytestmark = pytest.mark.gpu

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
every_dtype = pytest.mark.parametrize("dtype", [BRAIN, HALF, FULL], ids=["bf16", "fp16", "fp32"])
# The kernels' two families, and the widest of erases.
RULES = [("head", "tied", 1), ("none", "tied", 2), ("channel", "tied", 1), ("channel", "free", 1)]
DECAYING = [*RULES[:1], *RULES[2:], ("head", "tied", 2), ("head", "none", 1)]
every_rule = pytest.mark.parametrize(("decay", "erase", "n_steps"), RULES)


def check(case: Case, *, stress: bool = False) -> None:
    """Outputs, final state and gradients beside the definition, and beside the yardstick."""
    held_to_the_definition(case, truth.IMPL, stress=stress, device=truth.DEVICE)


@every_dtype
@pytest.mark.parametrize(("spacing", "strength"), [(1, -1e4), (7, -1e6), (29, -torch.inf)])
@pytest.mark.parametrize(("decay", "erase", "n_steps"), DECAYING)
def test_resets(decay, erase, n_steps, spacing, strength, dtype) -> None:
    # So many heads that the largest of few gradients does not decide.
    case = Kind(decay, erase, n_steps, dtype).case(tokens=150, heads=8, value_heads=16)
    log_decay = case.tensors["log_decay"]
    log_decay[0, ::spacing] = strength
    log_decay[1, 3::spacing, 0] = strength
    # Between resets, decays that cost those after them no digits.
    log_decay[:, 5::9] = -59.0
    check(case)


@every_dtype
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize(("decay", "erase", "n_steps"), RULES[:3])
def test_write_strengths_at_their_ends(decay, erase, n_steps, beta, dtype) -> None:
    case = Kind(decay, erase, n_steps, dtype).case(tokens=150)
    tensors = {"beta": torch.full_like(case.tensors["beta"], beta)}
    if decay != "none":
        # Weak enough that what is never erased outlasts the sequence.
        tensors["log_decay"] = 0.1 * case.tensors["log_decay"]
    check(case.changed(**tensors), stress=True)


@every_dtype
@pytest.mark.parametrize("spread", [0.0, 0.5])
@pytest.mark.parametrize(("decay", "erase", "n_steps"), RULES[:3])
def test_identical_and_correlated_keys(decay, erase, n_steps, spread, dtype) -> None:
    case = Kind(decay, erase, n_steps, dtype).case(tokens=150, beta_max=2.0)
    k = case.tensors["k"].float()
    k = F.normalize(k[:, :1] + spread * k, dim=-1)
    check(case.changed(k=k.to(dtype)), stress=True)


@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=["bf16", "fp16"])
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_as_many_heads_as_keep_a_gpu_busy(decay, dtype) -> None:
    # Fewer are cut into narrower tiles of the state, or split into segments.
    sizes = {"key_size": 16, "value_size": 128, "heads": 34, "value_heads": 68}
    check(Kind(decay, "tied", 1, dtype).case(batch=1, tokens=128, **sizes))


SIZES = [(1, 1), (3, 70), (100, 72), (96, 192), (130, 17), (256, 512)]


@pytest.mark.parametrize("dtype", [BRAIN, FULL], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("key_size", "value_size"), SIZES)
@every_rule
def test_any_size(decay, erase, n_steps, key_size, value_size, dtype) -> None:
    kind = Kind(decay, erase, n_steps, dtype)
    # As many heads as make an error a mean over hundreds of numbers, not the luck of a few.
    heads = max(1, 256 // min(key_size, value_size))
    sizes = {"key_size": key_size, "value_size": value_size, "heads": heads}
    case = kind.case(lengths=(70, 0, 1, 64), value_heads=2 * heads, **sizes)
    # With one channel all keys are alike, up to their signs.
    check(case, stress=key_size == 1)
