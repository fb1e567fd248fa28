"""What no model can have, refused with the name of the field."""

import dataclasses
import functools
import typing
from collections.abc import Collection, Mapping
from types import NoneType
from typing import Any

from deltarule.nearest import check_known
from deltarule.nn import MIXERS, checks
from deltarule.nn.checks import check_that
from deltarule.nn.experts import ROUTING, check_routing
from deltarule.nn.state import MOST_LAYERS

# Integers that may be zero; the others may not.
_COUNTS = (
    "qk_rope_head_dim", "conv_size", "mlp_size", "num_experts", "shared_expert_intermediate_size",
    "num_persistent",
)  # fmt: skip
# Numbers that are checked on their own; the others are above 0.
_OTHER_NUMBERS = ("gate_lower_bound", "partial_rotary_factor")
# What words there are, where no type says it.
_WORDS: dict[str, Collection[str]] = {**checks.WORDS, "post_norm": MIXERS}
# What a block has beside mixers in its first half.
MLP_PARTS = ("mlp", "moe", "channel_mix")
# Options by the parts, without all of which they mean nothing.
_PLAIN, _LATENT = (f"attention {word} kv_lora_rank" for word in ("without", "with"))
_OWN: dict[tuple[str, ...], tuple[str, ...]] = {
    ("attention",): ("kv_lora_rank",),
    (_LATENT,): ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    (_PLAIN, "sliding_window"): (
        "num_kv_heads", "attention_head_dim", "attention_qk_norm", "attention_gate",
    ),
    ("attention", "sliding_window"): (
        "num_attention_heads", "partial_rotary_factor", "attention_multiplier",
        "attention_out_multiplier",
    ),
    ("rwkv7",): ("low_rank_dims",), ("mlstm", "xlstm_7b"): ("output_norm_bias",),
    ("mamba1", "signed_mamba1"): ("mamba_inner_norm", "time_step_rank"),
    ("kda",): ("output_gate_bias",),
    ("mamba2",): ("n_groups", "mamba_rms_norm", "ssm_multipliers", "ssm_out_multiplier"),
    ("moe", "sparse in mlp_layer_types"): (
        *ROUTING, "moe_intermediate_size", "shared_expert_intermediate_size", "shared_expert_gate",
    ),
}  # fmt: skip
_OWNERS = {name: parts for parts, names in _OWN.items() for name in names}
# Sizes that a model may have for all: each layer takes what it has. Then what mixers know beside.
SIZES = frozenset({"head_k_dim", "head_v_dim", "conv_size"})
_ASKED_FOR = {*checks.REASONS, "conv_bias", "output_gate"} - SIZES
# Options of some layers, and up to where they change nothing.
_NEUTRAL = {
    "beta_max": 1, "n_steps": 1, "normalizer": False, "conv_bias": False, "output_gate": False
}  # fmt: skip


def check_fields(config: Any) -> None:
    """Refuse a value of the wrong type or range; None passes where it is the default."""
    kinds = _kinds(config.__class__)
    for field in dataclasses.fields(config):
        value, optional = getattr(config, field.name), field.default is None
        if not (optional and value is None):
            _check_kind(field.name, value, kinds[field.name], optional)
    layers = config.num_layers
    check_that(layers <= MOST_LAYERS, f"num_layers must be at most {MOST_LAYERS}", layers)
    checks.check_beta_max(config.beta_max)
    checks.check_lower_bound(config.gate_lower_bound)
    checks.check_share(config.partial_rotary_factor)
    if config.post_norm is not None and config.deepnorm_alpha is not None:
        raise ValueError("post_norm and deepnorm_alpha exclude each other: give one of them")
    if config.low_rank_dims is not None:
        four = isinstance(config.low_rank_dims, tuple) and len(config.low_rank_dims) == 4
        check_that(four, "low_rank_dims must be 4 integers", config.low_rank_dims)
        for rank in config.low_rank_dims:
            checks.check_integer("low_rank_dims", rank, 1)
    for name, count in (("ssm_multipliers", 5), ("mlp_multipliers", 2)):
        value = getattr(config, name)
        fits = isinstance(value, tuple) and len(value) == count
        fits = fits and all(map(checks.is_number, value))
        check_that(fits, f"{name} must be a tuple of {count} numbers", value)
    heads, values = config.num_heads, config.num_v_heads or config.num_heads
    checks.check_multiple("num_v_heads", values, "num_heads", heads)
    said = f"n_groups must divide the {values} heads of Mamba-2 layers"
    check_that(values % config.n_groups == 0, said, config.n_groups)
    name = "num_heads" if config.num_attention_heads is None else "num_attention_heads"
    queries = config.num_attention_heads or heads
    whole = config.num_kv_heads is None or queries % config.num_kv_heads == 0
    check_that(whole, f"num_kv_heads must divide {name}={queries}", config.num_kv_heads)


@functools.cache
def _kinds(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    choices = {name: typing.get_args(hint) for name, hint in hints.items()}
    return hints | {name: kinds[0] for name, kinds in choices.items() if NoneType in kinds}


def _check_kind(name: str, value: Any, kind: Any, optional: bool) -> None:
    literal = typing.get_origin(kind) is typing.Literal
    words = typing.get_args(kind) if literal else _WORDS.get(name)
    if words is not None:
        check_known(name, value, words, " or None" * optional)
    if kind is int:
        checks.check_integer(name, value, int(name not in _COUNTS), " or None" * optional)
    if kind is float and name not in _OTHER_NUMBERS:
        checks.above_zero(name, value)
    if kind is bool and not isinstance(value, bool):
        known = "True, False or None" if optional else "True or False"
        raise ValueError(f"{name} must be {known}, got {value!r}")


def check_used(config: Any) -> None:
    """Refuse an option that no layer of the model has: it would silently do nothing."""
    options = vars(config)
    parts = _parts(options)
    if "moe" in parts:
        _check_experts(config)
    if config.mlp_size == 0 and parts & {"mlp", "channel_mix", "dense"}:
        raise ValueError("mlp_size must be above 0 for the MLPs of this model, got 0")
    if config.post_norm is not None:
        check_known("post_norm", config.post_norm, dict.fromkeys(config.layer_types), " or None")
    for name in unused(config.__class__, options):
        raise ValueError(
            f"{name}={options[name]!r} has no effect on any of layer_types "
            f"{', '.join(dict.fromkeys(config.layer_types))}: leave it out, or use one of "
            f"{', '.join(_owners(name))}"
        )
    owners = [MIXERS[part] for part in parts & {*_owners("conv_bias")}]
    taps = [checks.default(config.conv_size, mixer.default_conv_size) for mixer in owners]
    if config.conv_bias and not any(taps):
        raise ValueError("conv_bias=True has no effect without a convolution: give a conv_size")


def unused(config_class: Any, options: Mapping[str, Any], *beside: str) -> list[str]:
    """Options other than their defaults that no layer of the model has, and others `beside`."""
    neutral = {field.name: field.default for field in dataclasses.fields(config_class)}
    given = {name: value for name, value in options.items() if value != neutral[name]}
    parts, most = _parts(options), _NEUTRAL | {"num_v_heads": options["num_heads"]}
    names = [name for name in given if name in {*_ASKED_FOR, *_OWNERS, *beside}]
    over = [name for name in names if name not in most or given[name] > most[name]]
    return [name for name in over if not parts & {*_owners(name)}]


def _owners(name: str) -> tuple[str, ...]:
    return _OWNERS.get(name) or tuple(key for key, mixer in MIXERS.items() if mixer.takes(name))


def _parts(options: Mapping[str, Any]) -> set[str]:
    """What the blocks are made of, and the kinds of their second halves."""
    names = options["layer_types"], options.get("mlp_layer_types") or ()
    layers, kinds = (given if isinstance(given, tuple) else (given,) for given in names)
    parts = {part for name in (*layers, *kinds) for part in str(name).split("+")}
    if "attention" in parts:
        parts.add(_PLAIN if options.get("kv_lora_rank") is None else _LATENT)
    return parts | ({"moe"} if "sparse" in parts else set())


def _check_experts(config: Any) -> None:
    inner = config.moe_intermediate_size
    said = "moe_intermediate_size must be given where there are experts"
    check_that(inner is not None, said, inner)
    check_routing(config)
    if config.shared_expert_gate and not config.shared_expert_intermediate_size:
        raise ValueError("shared_expert_gate=True needs a shared_expert_intermediate_size")
