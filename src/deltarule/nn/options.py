"""The options of layers: which mean something for which, and what `help` says of them."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from deltarule.nearest import check_known
from deltarule.nn.checks import default
from deltarule.nn.feature_maps import FEATURE_MAPS, NORMS, OUTPUT_NORMS

# Options that mean something for every recurrent layer.
COMMON = frozenset(
    {"head_k_dim", "head_v_dim", "conv_size", "conv_bias", "output_gate", "norm_eps"}
) | {"layer_index", "num_layers"}
# Spectra that S4D knows.
SPECTRA = ("legs", "inv", "lin")
# As the authors of TTT have it.
MINI_BATCH = 16
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


def check_maps(
    feature_map: object, qk_norm: object, output_norm: object, normalizer: object
) -> None:
    """Refuse words that are no feature map and no norm, and a normaliser that is no flag."""
    for name, value, known in (
        ("feature_map", feature_map, list(FEATURE_MAPS)),
        ("qk_norm", qk_norm, list(NORMS)),
        ("output_norm", output_norm, list(OUTPUT_NORMS)),
    ):
        if value is not None:
            check_known(name, value, known)
    if not isinstance(normalizer, bool):
        raise ValueError(f"normalizer must be True, False or None, got {normalizer!r}")


def check_divides(normalizer: bool, feature_map: str | None) -> None:
    """Refuse to divide by a sum that may be zero or negative."""
    name = default(feature_map, "identity")
    if normalizer and not FEATURE_MAPS[name].divides:
        known = ", ".join(name for name, entry in FEATURE_MAPS.items() if entry.divides)
        raise ValueError(
            f"normalizer=True divides by a sum of phi(q) . phi(k), which feature_map={name!r} may "
            f"make zero or negative: choose one of {known}"
        )


def check_size_kept(feature_map: str, features: int, channels: int) -> None:
    """Refuse more features than there are decays."""
    if features != channels:
        raise ValueError(
            f"feature_map must keep the {channels} channels of a key, each of which has a gate of "
            f"its own, but {feature_map!r} makes {features}: choose an elementwise one"
        )


ALWAYS = ("hidden_size", "num_heads")


def document(layer: Any, base: Any) -> None:
    """Let `help` show the arguments that a layer takes, which base describes, and its source."""
    parameters = dict(list(inspect.signature(layer.__init__).parameters.items())[1:])
    if layer.__init__ is base.__init__ and hasattr(layer, "rule"):
        taken = [name for name in parameters if name in ALWAYS or layer.takes(name)]
        parameters = {name: parameters[name] for name in taken}
        if layer.__doc__ and base.__doc__ and "Args:" not in layer.__doc__:
            layer.__doc__ = with_arguments(layer.__doc__, base.__doc__, list(parameters))
    if layer.__doc__ and hasattr(layer, "rule") and "Source:" not in layer.__doc__:
        layer.__doc__ = f"{layer.__doc__.rstrip()}\n\n    Source: {layer.rule.source}.\n    "
    layer.__signature__ = inspect.Signature(list(parameters.values()))


def with_arguments(text: str, source: str, names: list[str]) -> str:
    """Put what a docstring says of the named arguments into another, before its example."""
    section = re.search(r"    Args:\n(.*?)\n\n", source, re.DOTALL)
    if section is None:
        return text
    entries = re.split(r"\n(?= {8}\w)", section[1])
    chosen = [entry for entry in entries if entry.strip().partition(":")[0] in names]
    arguments = "\n".join(["    Args:", *chosen])
    head, found, tail = text.partition("    Examples:\n")
    return f"{head}{arguments}\n\n{found}{tail}" if found else f"{text.rstrip()}\n\n{arguments}\n"
