"""What layers are given, checked: options, inputs and states, each refused by its name."""

import math
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import TypeGuard, TypeVar, get_args

import torch
from torch import Tensor

from deltarule.nearest import check_known
from deltarule.nn.feature_maps import FEATURE_MAPS, NORMS
from deltarule.nn.rule import OutputNorm
from deltarule.nn.state import State
from deltarule.ops.checks import check_dense
from deltarule.ops.plain import check_integer as check_integer
from deltarule.ops.plain import of_python as of_python

T = TypeVar("T")
# What autocast casts to its own dtype; it leaves float64 and integers as they are.
AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)
# Options that mean something for every recurrent layer.
COMMON = frozenset(
    {"head_k_dim", "head_v_dim", "conv_size", "conv_bias", "output_gate", "norm_eps"}
) | {"layer_index", "num_layers"}
# Spectra that S4D knows.
SPECTRA = ("legs", "inv", "lin")
# What options that are words know.
WORDS: dict[str, Collection[str]] = {
    "feature_map": FEATURE_MAPS, "qk_norm": NORMS, "output_norm": get_args(OutputNorm),
    "spectrum": SPECTRA,
}  # fmt: skip
# Why an option means nothing for a layer.
REASONS = {
    "num_v_heads": "its value heads are its key heads",
    "head_k_dim": "its state is a vector; give head_v_dim",
    "head_v_dim": "its keys and values have one size",
    "conv_size": "it looks back one token instead",
    "beta_max": "it has no write strength",
    "n_steps": "it writes once a token",
    "feature_map": "linear_attention, gated_rfa and the delta layers have it",
    "qk_norm": "linear_attention, gated_rfa and the delta layers have it",
    "output_norm": "the delta layers and lightning have it",
    "normalizer": "linear_attention has it; with an erase, the sum of the keys is not what the "
    "state holds: use qk_norm",
    "longest_horizon": "its decay is not exp(-exp(A_log) dt), whose rates it would spread",
    "gate_lower_bound": "kda has it",
    "mini_batch": "ttt and titans have mini-batches",
    "spectrum": "s4d has complex eigenvalues",
    "window": "it has no attention",
    "num_persistent": "titans_mac, titans_mag and titans_mal have learned tokens",
    "num_slots": "abc, gsa and the multi-head DeltaNets have slots",
    "filter_size": "hyena and multi_head_hyena have filters",
    "rope_theta": "it does not rotate its queries and keys",
}


def check_that(holds: bool, said: str, given: object, remedy: str = "") -> None:
    """Raise `said`, which argument must be what, with the given value, unless it holds."""
    if not holds:
        raise ValueError(f"{said}, got {given!r}{': ' if remedy else ''}{remedy}")


def positive(name: str, value: int) -> int:
    return check_integer(name, value, 1)


def check_least(options: object, least: float, *names: str) -> None:
    """Refuse options of these names that are below a number, nan or infinite; None passes."""
    for name in names:
        value = getattr(options, name)
        fits = value is None or least <= value < math.inf
        check_that(fits, f"{name} must be {least} or more", value)


def above_zero(name: str, value: float) -> float:
    holds = is_number(value) and value > 0
    check_that(holds, f"{name} must be a finite number above 0", value)
    return float(value)


def check_lower_bound(bound: float | None) -> float | None:
    holds = bound is None or (is_number(bound) and bound < 0)
    check_that(holds, "gate_lower_bound must be None or a finite number < 0", bound)
    return bound if bound is None else float(bound)


def default(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


def check_multiple(name: str, value: int, of: str, divisor: int) -> None:
    check_that(value % divisor == 0, f"{name} must be a multiple of {of}={divisor}", value)


def check_even(name: str, channels: int) -> None:
    check_that(channels % 2 == 0, f"{name} must be even for rotary positions", channels)


def check_beta_max(beta_max: float | None) -> float | None:
    """Refuse a write strength that makes the state grow."""
    if beta_max is None:
        return None
    holds = is_number(beta_max) and 0 < beta_max <= 2
    why = "beyond 2 a write makes the state grow without bound"
    check_that(holds, "beta_max must be a number in (0, 2]", beta_max, why)
    return float(beta_max)


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
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        why = "it comes from elsewhere" if found else "attention keeps none of packed rows"
        raise ValueError(f"state must hold {sorted(empty)}, got {found}: {why}")
    for key, expected in empty.items():
        name, given, sizes = f"state[{key!r}]", state[key], [sequences, *expected.shape[1:]]
        check_dense(name, given, f" {sizes}")
        if list(given.shape) != sizes:
            raise ValueError(f"{name} must be {sizes}, sequences first, got {list(given.shape)}")
        if given.device != expected.device:
            raise ValueError(
                f"{name} is on {given.device}, but the layer is on {expected.device}: "
                f"move it with state.to({str(expected.device)!r})"
            )
        # The histories of 16-bit calls are in 16 bits; what sums over all tokens never is.
        kept_exact = key in exact or not expected.is_floating_point()
        if kept_exact and given.dtype != expected.dtype:
            raise ValueError(
                f"{name} must be {expected.dtype}, got {given.dtype}: "
                "keep it as the layer returned it, or cast it back"
            )
    return state


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def check_meant(
    layer: str,
    takes: Callable[[str], bool],
    given: Mapping[str, object],
    neutral: Mapping[str, object],
) -> None:
    """Refuse options that mean nothing for a layer, unless their value changes nothing."""
    for name, value in given.items():
        if value is None or takes(name) or (name in neutral and value == neutral[name]):
            continue
        harmless = f" or {neutral[name]}" if name in neutral else ""
        raise ValueError(
            f"{name} must be None{harmless} for {layer}, got {value!r}: {REASONS[name]}"
        )


def check_words(words: Mapping[str, str | None]) -> None:
    """Refuse words that an option does not know."""
    for name, value in words.items():
        if value is not None:
            check_known(name, value, WORDS[name])


def check_flags(flags: Mapping[str, object]) -> None:
    for name, value in flags.items():
        check_that(isinstance(value, bool | None), f"{name} must be True, False or None", value)


def check_share(share: object) -> None:
    holds = is_number(share) and 0 <= share <= 1
    check_that(holds, "partial_rotary_factor must be a number in [0, 1]", share)


def check_features(name: str, channels: int, normalizer: bool, own_gates: bool) -> None:
    """Refuse to divide by a sum that may be zero or negative, and more features than decays."""
    if normalizer and not FEATURE_MAPS[name].divides:
        known = ", ".join(name for name, entry in FEATURE_MAPS.items() if entry.divides)
        raise ValueError(
            f"normalizer=True divides by a sum of phi(q) . phi(k), which feature_map={name!r} may "
            f"make zero or negative: choose one of {known}"
        )
    if own_gates and (features := FEATURE_MAPS[name].size(channels)) != channels:
        raise ValueError(
            f"feature_map must keep the {channels} channels of a key, each of which has a gate of "
            f"its own, but {name!r} makes {features}: choose an elementwise one"
        )
