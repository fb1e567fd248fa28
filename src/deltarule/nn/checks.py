"""Checks of what layers are given, each naming the argument."""

import math
from collections.abc import Collection
from typing import TypeVar

import torch
from torch import Tensor

from deltarule.nn.state import State
from deltarule.ops.checks import check_dense

T = TypeVar("T")
# What autocast casts to its own dtype; it leaves float64 and integers as they are.
AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


def positive(name: str, value: int) -> int:
    check_integer(name, value, 1)
    return value


def check_integer(name: str, value: object, smallest: int, optional: bool = False) -> None:
    """Refuse what is no integer of `smallest` or more; the message says if it may be None."""
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        or_none = " or None" if optional else ""
        raise ValueError(f"{name} must be an integer of {smallest} or more{or_none}, got {value!r}")


def check_least(options: object, least: float, *names: str) -> None:
    """Refuse options of these names that are below a number, nan or infinite; None passes."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"{name} must be {least} or more, got {value}")


def above_zero(name: str, value: float) -> float:
    if not is_number(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return value


def check_horizon(longest: float | None) -> float | None:
    """Return the longest horizon if heads can be spread up to it."""
    if longest is not None and (not is_number(longest) or longest <= 8):
        raise ValueError(f"longest_horizon must be None or a number above 8, got {longest!r}")
    return longest


def check_lower_bound(bound: float | None) -> float | None:
    """Return the least log_decay if it is one."""
    if bound is not None and (not is_number(bound) or bound >= 0):
        raise ValueError(f"gate_lower_bound must be None or a finite number < 0, got {bound!r}")
    return bound


def default(value: T | None, otherwise: T) -> T:
    """Return the value, or the other where it is None."""
    return otherwise if value is None else value


def check_multiple(name: str, value: int, of: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(f"{name} must be a multiple of {of}={divisor}, got {value}")


def check_even(name: str, channels: int) -> None:
    """Refuse channels that cannot be paired."""
    if channels % 2:
        raise ValueError(f"{name} must be even for rotary positions, got {channels}")


def default_head_dim(name: str, factor: float, hidden_size: int, heads: str, parts: int) -> int:
    """Return factor * hidden_size / parts, the size of a head, if the heads can share so evenly."""
    channels = factor * hidden_size
    if channels % parts:
        size = "hidden_size" if factor == 1 else f"{factor:g} * hidden_size"
        raise ValueError(
            f"{size} must be a multiple of {heads}={parts}, got {channels:g}: "
            f"change one of them, or give {name}"
        )
    return int(channels) // parts


def check_beta_max(beta_max: float | None) -> float | None:
    """Refuse a write strength that makes the state grow."""
    if beta_max is None:
        return None
    if not is_number(beta_max) or not 0 < beta_max <= 2:
        raise ValueError(
            f"beta_max must be a number in (0, 2], got {beta_max!r}: beyond 2 a write makes "
            "the state grow without bound"
        )
    return float(beta_max)


def check_depth(layer_index: int, num_layers: int) -> tuple[int, int]:
    """Refuse a layer that lies outside its model."""
    positive("num_layers", num_layers)
    integer = isinstance(layer_index, int) and not isinstance(layer_index, bool)
    if not integer or not 0 <= layer_index < num_layers:
        raise ValueError(
            f"layer_index must be an integer from 0 to num_layers - 1 = {num_layers - 1}, "
            f"got {layer_index!r}"
        )
    return layer_index, num_layers


def check_input(x: Tensor, hidden_size: int, weight: Tensor, one_dtype: bool = True) -> None:
    """Refuse an input of another width, device or dtype than the layer's; autocast may cast it."""
    if x.shape[2] != hidden_size:
        raise ValueError(f"x must have hidden_size={hidden_size} channels, got {list(x.shape)}")
    if x.device != weight.device:
        raise ValueError(
            f"x is on {x.device}, but the layer is on {weight.device}: move one with .to(device)"
        )
    if x.dtype == weight.dtype or not one_dtype:
        return
    castable = x.dtype in AUTOCAST and weight.dtype in AUTOCAST
    available = torch.amp.is_autocast_available(x.device.type)
    if not (castable and available and torch.is_autocast_enabled(x.device.type)):
        raise ValueError(
            f"x must be {weight.dtype} like the layer's weights, got {x.dtype}: "
            "cast one with .to(dtype), or use torch.autocast for 16 bits"
        )


def check_state(
    state: State, empty: State, sequences: int, exact: Collection[str] = ("recurrent",)
) -> State:
    """Refuse a state of another layer or with another number of sequences; empty has none."""
    if not isinstance(state, dict) or set(state) != set(empty):
        given = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"state must hold {sorted(empty)}, got {given}: it comes from elsewhere")
    for name, expected in empty.items():
        _check_state_tensor(f"state[{name!r}]", state[name], expected, sequences)
        # The histories of 16-bit calls are in 16 bits; what sums over all tokens never is.
        kept_exact = name in exact or not expected.is_floating_point()
        if kept_exact and state[name].dtype != expected.dtype:
            raise ValueError(
                f"state[{name!r}] must be {expected.dtype}, got {state[name].dtype}: "
                "keep it as the layer returned it, or cast it back"
            )
    return state


def _check_state_tensor(name: str, given: Tensor, expected: Tensor, sequences: int) -> None:
    sizes = [sequences, *expected.shape[1:]]
    check_dense(name, given, f" {sizes}")
    if list(given.shape) != sizes:
        raise ValueError(f"{name} must be {sizes}, sequences first, got {list(given.shape)}")
    if given.device != expected.device:
        raise ValueError(
            f"{name} is on {given.device}, but the layer is on {expected.device}: "
            f"move it with state.to({str(expected.device)!r})"
        )


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
