"""The one configuration of the one language model."""

import dataclasses
import difflib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from deltarule.models.config_names import for_file, from_file
from deltarule.models.patterns import PATTERNS
from deltarule.nn import MIXERS
from deltarule.nn.feature_maps import FEATURE_MAPS, NORMS
from deltarule.nn.json_file import parse_object
from deltarule.nn.rule import QueryKeyNorm


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and layers of a `CausalLM`; None leaves an option at each layer's own default.

    Args:
        vocab_size: Tokens; 257 for `deltarule.models.bytes`.
        hidden_size: Channels of the residual stream.
        num_layers: Blocks, each a mixer and an MLP.
        layer_types: The mixer of each block, by its name in `deltarule.nn.MIXERS`: one name, or
            a pattern whose length divides num_layers and that repeats; or a published pattern by
            its name in `deltarule.models.PATTERNS`. Kept as a tuple of num_layers names.
        num_heads: Query and key heads.
        num_v_heads: Value heads of recurrent layers, a multiple of num_heads. None: num_heads.
        head_k_dim: Channels of a query or key. None: the layer's default.
        head_v_dim: Channels of a value. None: the layer's default.
        num_attention_heads: Query heads of attention, where it has others than recurrent layers.
            None: num_heads.
        num_kv_heads: Key and value heads of attention, a divisor of its query heads. None: as many.
        attention_head_dim: Channels of a head of attention. None: hidden_size over its query heads.
        attention_qk_norm: A norm of attention's q and k: "head", of each head; "all", of all heads
            together. None: no norm.
        attention_gate: Whether attention multiplies its output by sigmoid of a projection of x.
        partial_rotary_factor: Share of a head's channels that attention turns, the first ones, in
            [0, 1]; 0: no positions.
        conv_size: Taps of the short convolution of recurrent layers; 0 removes it. None: the
            layer's default.
        conv_bias: Whether that convolution adds a bias before its SiLU. None: it does not.
        n_groups: Key heads of Mamba-2 layers, a divisor of their heads.
        output_gate: Whether recurrent layers gate their output. None: the layer's default.
        beta_max: Largest write strength of delta layers; 2.0 allows negative eigenvalues. None:
            the layer's default.
        longest_horizon: Tokens that the slowest head of layers with rates of decay starts by
            remembering, their heads spread from 8 tokens to it. None: each paper's draw.
        n_steps: Writes for each token in DeltaProduct layers. None: the layer's default.
        feature_map: What q and k of linear attention, Gated RFA, DeltaNet and DeltaProduct go
            through, by its name in `deltarule.nn.feature_maps`. None: the layer's default.
        qk_norm: What those layers divide q and k by: "none", "l1" or "l2". None: the layer's
            default.
        normalizer: Divide linear attention's read-out by z^T q. None: the layer's default.
        filter_size: Tokens that Hyena's filters reach. None: the layer's default.
        window: Tokens that sliding-window attention sees. None: the layer's default.
        rope_theta: Base of the rotary position wavelengths of attention and RetNet.
        mlp_size: Channels inside the SwiGLU. None: 8/3 of hidden_size, up to a multiple of 16;
            0: no MLP.
        norm_eps: Added to the mean square in every RMSNorm.
        output_norm_eps: Added in its place in the output norms of recurrent layers. None: norm_eps.
        zero_centered_norm: Keep the weights of the stream's norms, and of attention's q and k, less
            one.
        post_norm: A mixer whose blocks compute x + norm(f(x)) in place of x + f(norm(x)), in both
            halves. None: no block does.
        tie_embeddings: Use the embedding as the output head.

    Raises:
        ValueError: A field has the wrong type, range or length, or names an unknown layer.

    Examples:
        >>> config = ModelConfig(vocab_size=257, hidden_size=64, num_layers=4, num_heads=2,
        ...                      layer_types=("gated_deltanet", "attention"))
        >>> config.layer_types
        ('gated_deltanet', 'attention', 'gated_deltanet', 'attention')
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_types: str | tuple[str, ...]
    num_heads: int
    num_v_heads: int | None = None
    head_k_dim: int | None = None
    head_v_dim: int | None = None
    num_attention_heads: int | None = None
    num_kv_heads: int | None = None
    attention_head_dim: int | None = None
    attention_qk_norm: Literal["head", "all"] | None = None
    attention_gate: bool = False
    partial_rotary_factor: float = 1.0
    conv_size: int | None = None
    conv_bias: bool | None = None
    n_groups: int = 1
    output_gate: bool | None = None
    beta_max: float | None = None
    longest_horizon: float | None = None
    n_steps: int | None = None
    feature_map: str | None = None
    qk_norm: QueryKeyNorm | None = None
    normalizer: bool | None = None
    filter_size: int | None = None
    window: int | None = None
    rope_theta: float = 10000.0
    mlp_size: int | None = None
    norm_eps: float = 1e-5
    output_norm_eps: float | None = None
    zero_centered_norm: bool = False
    post_norm: str | None = None
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        """Refuse what no model can have, naming the field; then write out the layer pattern."""
        _check_integers(self)
        _check_numbers(self)
        _check_flags(self)
        _check_words(self)
        _check_heads(self)
        layer_types = _expand_layer_types(self.layer_types, self.num_layers)
        object.__setattr__(self, "layer_types", layer_types)
        _check_used(self)

    def to_json(self) -> str:
        """Return every field as a JSON object, in names that transformers reads, too."""
        return json.dumps(self.to_fields(), indent=2) + "\n"

    def to_fields(self) -> dict[str, Any]:
        """Return what `to_json` writes, as an object."""
        return for_file(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "ModelConfig":
        """Read what `to_json` wrote; a field that is absent takes its default.

        Args:
            text: A JSON object whose keys are the fields of this class, or what transformers
                writes for the same model.

        Returns:
            The configuration, checked like one made by hand.

        Raises:
            ValueError: The text is not a JSON object, a key is unknown, repeated or missing, or a
                value is refused; the message names the key.
        """
        return cls.from_fields(parse_object(text))

    @classmethod
    def from_fields(cls, stored: dict[str, Any]) -> "ModelConfig":
        """Do what `from_json` does, from a JSON object that is parsed already."""
        fields = from_file(stored)
        known = {field.name: field for field in dataclasses.fields(cls)}
        for key in fields:
            if key not in known:
                raise ValueError(f"unknown key {key!r}{_nearest(key, known)}")
        required = [name for name, field in known.items() if field.default is dataclasses.MISSING]
        if missing := [name for name in required if name not in fields]:
            raise ValueError(f"missing key {', '.join(map(repr, missing))}")
        if isinstance(fields["layer_types"], list):
            fields["layer_types"] = tuple(fields["layer_types"])
        return cls(**fields)


# More than any model has; a damaged file could ask for a billion.
_MOST_LAYERS = 10_000
_SMALLEST = {
    "vocab_size": 1, "hidden_size": 1, "num_layers": 1, "num_heads": 1, "num_v_heads": 1,
    "head_k_dim": 1, "head_v_dim": 1, "num_attention_heads": 1, "num_kv_heads": 1,
    "attention_head_dim": 1,
    "conv_size": 0, "n_groups": 1, "n_steps": 1, "filter_size": 1, "window": 1, "mlp_size": 0,
}  # fmt: skip
_OPTIONAL = {
    "num_v_heads", "head_k_dim", "head_v_dim", "num_attention_heads", "num_kv_heads",
    "attention_head_dim", "output_norm_eps",
    "conv_size", "n_steps", "filter_size", "window", "mlp_size", "beta_max", "longest_horizon",
}  # fmt: skip


def _check_integers(config: ModelConfig) -> None:
    for name, smallest in _SMALLEST.items():
        value = getattr(config, name)
        if value is None and name in _OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            or_none = " or None" if name in _OPTIONAL else ""
            raise ValueError(
                f"{name} must be an integer of {smallest} or more{or_none}, got {value!r}"
            )
    if config.num_layers > _MOST_LAYERS:
        raise ValueError(f"num_layers must be at most {_MOST_LAYERS}, got {config.num_layers}")


def _check_numbers(config: ModelConfig) -> None:
    for name in ("beta_max", "longest_horizon", "rope_theta", "norm_eps", "output_norm_eps"):
        value = getattr(config, name)
        if value is None and name in _OPTIONAL:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    share = config.partial_rotary_factor
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(f"partial_rotary_factor must be a number in [0, 1], got {share!r}")
    if config.beta_max is not None and config.beta_max > 2:
        raise ValueError(
            f"beta_max must be at most 2, got {config.beta_max}: above 2 a write makes the state "
            "grow without bound"
        )


def _check_flags(config: ModelConfig) -> None:
    for name in ("tie_embeddings", "attention_gate", "zero_centered_norm"):
        if not isinstance(value := getattr(config, name), bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
    for name in ("conv_bias", "output_gate", "normalizer"):
        if (value := getattr(config, name)) is not None and not isinstance(value, bool):
            raise ValueError(f"{name} must be True, False or None, got {value!r}")


def _check_words(config: ModelConfig) -> None:
    choices = {
        "feature_map": FEATURE_MAPS, "qk_norm": NORMS, "attention_qk_norm": ("head", "all"),
        "post_norm": MIXERS,
    }  # fmt: skip
    for name, known in choices.items():
        value = getattr(config, name)
        if value is not None and (not isinstance(value, str) or value not in known):
            raise ValueError(
                f"{name} must be None or one of {', '.join(known)}, got {value!r}"
                f"{_nearest(value, known)}"
            )


def _check_heads(config: ModelConfig) -> None:
    heads = config.num_heads
    if config.num_v_heads is not None and config.num_v_heads % heads:
        raise ValueError(
            f"num_v_heads must be a multiple of num_heads={heads}, got {config.num_v_heads}"
        )
    values = config.num_v_heads or heads
    if values % config.n_groups:
        raise ValueError(
            f"n_groups must divide the {values} heads of Mamba-2 layers, got {config.n_groups}"
        )
    name = "num_heads" if config.num_attention_heads is None else "num_attention_heads"
    queries = config.num_attention_heads or heads
    if config.num_kv_heads is not None and queries % config.num_kv_heads:
        raise ValueError(f"num_kv_heads must divide {name}={queries}, got {config.num_kv_heads}")


def _expand_layer_types(given: str | tuple[str, ...], num_layers: int) -> tuple[str, ...]:
    """Look up a published pattern, or repeat the names over all layers, each known."""
    pattern = (given,) if isinstance(given, str) else given
    if not isinstance(pattern, tuple) or not pattern:
        raise ValueError(f"layer_types must be a name or a tuple of names, got {given!r}")
    if len(pattern) == 1 and isinstance(pattern[0], str) and pattern[0] in PATTERNS:
        return PATTERNS[pattern[0]].layers(num_layers)
    for name in pattern:
        _check_layer(name)
    if num_layers % len(pattern):
        raise ValueError(
            f"layer_types is a pattern of {len(pattern)} names, which does not divide "
            f"num_layers={num_layers}"
        )
    return pattern * (num_layers // len(pattern))


def _check_layer(name: object) -> None:
    if isinstance(name, str) and name in MIXERS:
        return
    if isinstance(name, str) and name in PATTERNS:
        raise ValueError(
            f"layer_types must be {name!r} alone: it is a pattern of layers, not the name of one"
        )
    raise ValueError(
        f"layer_types names an unknown layer {name!r}{_nearest(name, [*MIXERS, *PATTERNS])}; "
        f"known: {', '.join(MIXERS)}; patterns: {', '.join(PATTERNS)}"
    )


# Options of some layers, and up to where they change nothing.
_NEUTRAL = {"beta_max": 1, "n_steps": 1, "normalizer": False}


def _check_used(config: ModelConfig) -> None:
    """Refuse an option that no layer of the model has: it would silently do nothing."""
    for name in ("beta_max", "longest_horizon", "n_steps", "feature_map", "qk_norm", "normalizer"):
        value = getattr(config, name)
        if value is None or (name in _NEUTRAL and value <= _NEUTRAL[name]):
            continue
        if not any(MIXERS[layer].takes(name) for layer in config.layer_types):
            known = ", ".join(layer for layer, mixer in MIXERS.items() if mixer.takes(name))
            raise ValueError(
                f"{name}={value!r} means nothing for any of layer_types "
                f"{', '.join(dict.fromkeys(config.layer_types))}: these have it: {known}"
            )
    if config.n_groups > 1 and "mamba2" not in config.layer_types:
        raise ValueError(f"n_groups={config.n_groups} means nothing without mamba2 in layer_types")


def _nearest(given: object, known: Iterable[str]) -> str:
    """Phrase the known name that looks most like the given one, or nothing."""
    matches = difflib.get_close_matches(str(given), list(known), n=1)
    return f": did you mean {matches[0]!r}?" if matches else ""
