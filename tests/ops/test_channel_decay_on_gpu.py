"""A decay per channel on a CUDA device: every size, fast and flagged chunks, against float64."""

import math

import pytest
import torch

from oracle import Case, compared, make_case
from tolerance import assert_close_to_yardstick

pytestmark = pytest.mark.gpu

SIZES = [(key, value, 1) for key in (3, 16, 32, 64, 128, 256) for value in (32, 64, 128, 256)]
SIZES += [(key, value, 2) for key in (3, 64, 128, 256) for value in (32, 256)]


def heads(key_size: int) -> int:
    """As many as make an error a mean over hundreds of channels, not the luck of a few."""
    return max(2, 256 // key_size)


def by_chunk(case: Case, *powers: float) -> Case:
    """Channels that decay by 2^-power over a chunk, in turn."""
    decay = case.tensors["log_decay"].mul_(0.05)
    for i, power in enumerate(powers):
        decay[..., i :: len(powers)] -= power * math.log(2) * case.n_steps / 64
    return case


def near_the_flag(case: Case) -> Case:
    """No chunk is flagged, but some channels decay nearly so far."""
    return by_chunk(case, 0, 70, 145)


def beyond_the_flag(case: Case) -> Case:
    """Chunks of which all, some or no rows are fast; a strong decay and a reset inside a block."""
    decay = by_chunk(case, 0, 10).tensors["log_decay"]
    decay[:, 20:60] *= 60
    decay[:, 66:70, :, ::2], decay[:, 100, :, 1::3] = -12.0, -1e4
    return case


def check(case: Case, dtype: torch.dtype) -> None:
    """Outputs and gradients of a repeated call against the yardstick."""
    case = case.to(dtype)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(compared(case, "triton", device="cuda"))
    first, again = found
    for name, (x, exact, own) in first.items():
        assert torch.equal(x, again[name].found), name
        bars = {"dtype": dtype, "gradient": name.startswith("d "), "name": name}
        assert_close_to_yardstick(x, exact, own, **bars)


@pytest.mark.parametrize("decays", [near_the_flag, beyond_the_flag])
@pytest.mark.parametrize(("key_size", "value_size", "n_steps"), SIZES)
def test_bfloat16(key_size: int, value_size: int, n_steps: int, decays) -> None:
    torch.manual_seed(key_size + value_size)
    case = make_case(
        "channel", heads=heads(key_size), value_heads=heads(key_size) * n_steps, tokens=128,
        key_size=key_size, value_size=value_size, n_steps=n_steps, normalize_qk=value_size > 32,
        beta_max=1.0,
    )  # fmt: skip
    check(decays(case), torch.bfloat16)


@pytest.mark.parametrize("decays", [near_the_flag, beyond_the_flag])
@pytest.mark.parametrize(("key_size", "value_size"), [(3, 32), (64, 64), (128, 128), (256, 32)])
@pytest.mark.parametrize("groups", [1, 2])
def test_free_erases(key_size: int, value_size: int, groups: int, decays) -> None:
    torch.manual_seed(key_size + groups)
    case = make_case(
        "channel", "free", heads=heads(key_size), value_heads=heads(key_size) * groups, tokens=128,
        key_size=key_size, value_size=value_size,
    )  # fmt: skip
    check(decays(case), torch.bfloat16)


@pytest.mark.parametrize("decays", [near_the_flag, beyond_the_flag])
@pytest.mark.parametrize("key_size", [16, 128])
@pytest.mark.parametrize("erase", ["none", "free"])
def test_packed_sequences(erase: str, key_size: int, decays) -> None:
    torch.manual_seed(key_size)
    case = make_case("channel", erase, lengths=(3, 0, 100, 64), key_size=key_size, value_size=48)
    check(decays(case), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("key_size", [3, 16, 64, 256])
def test_other_types(key_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(key_size)
    case = make_case(
        "channel", heads=heads(key_size), value_heads=2 * heads(key_size), tokens=128,
        key_size=key_size, value_size=64, normalize_qk=True, beta_max=1.0,
    )  # fmt: skip
    check(beyond_the_flag(case), dtype)
