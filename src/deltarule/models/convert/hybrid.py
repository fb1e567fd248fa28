"""What hybrids of recurrent layers and attention share in the layout of transformers."""

from collections.abc import Callable

from deltarule.models.config import ModelConfig
from deltarule.models.convert import options
from deltarule.models.convert.options import Entry, Fields, Follows, Options, Table
from deltarule.nn.checks import check_that
from deltarule.nn.state import MOST_LAYERS

# Words of config.json, those of older ones among them, by ours.
FULL_ATTENTION = ("full_attention", "attention")
RECURRENT = ("linear_attention", "mamba")


def stream(
    eps: str = "rms_norm_eps", otherwise: float = 1e-6, num_layers: int | Follows | None = None
) -> Table:
    """Sizes of the stream and of attention; `eps` of the norms is `otherwise` if not given."""

    def heads(config: ModelConfig) -> int:
        # A model without attention has no use for their sizes.
        return config.num_attention_heads or config.num_heads

    return (
        options.only({"hidden_act": ("silu", "swish"), "attention_bias": False}),
        *options.sizes(num_layers=num_layers),
        options.integer("num_attention_heads", smallest=1, value=heads),
        options.integer(
            "num_key_value_heads", "num_kv_heads", lambda found: found["num_attention_heads"],
            value=lambda config: config.num_kv_heads or heads(config),
        ),
        options.number(eps, "norm_eps", otherwise),
        options.tied(False),
    )  # fmt: skip


def places(found: Options) -> range:
    """The layers by their numbers, of which a damaged config.json may ask for any."""
    return range(min(found["num_layers"], MOST_LAYERS))


def words(given: object, num_layers: int, recurrent: str, *others: str) -> tuple[str, ...]:
    """The mixer of each layer, or one of the `others` in its place, from a list of words."""
    known = dict.fromkeys(RECURRENT, recurrent) | dict.fromkeys(FULL_ATTENTION, "attention")
    known |= {name: name for name in others}
    if not isinstance(given, list) or not all(isinstance(x, str) and x in known for x in given):
        raise ValueError(f"layer_types must be a list of {', '.join(known)}, got {given!r}")
    check_that(len(given) == num_layers, f"layer_types must name {num_layers} layers", len(given))
    return tuple(known[kind] for kind in given)


def in_words(config: ModelConfig, recurrent: str) -> list[str]:
    known = {recurrent: RECURRENT[0], "attention": FULL_ATTENTION[0]}
    if unknown := {*config.layer_types} - {*known}:
        raise ValueError(f"layer_types must be of {' and '.join(known)}, got {sorted(unknown)}")
    return [known[name] for name in config.layer_types]


def layers(recurrent: str, is_full: Callable[[Fields], Callable[[int], bool]]) -> Entry:
    """The mixer of each layer, from a list of words; where none is given, `is_full` says which."""

    def found(fields: Fields, before: Options) -> Options:
        full = is_full(fields)
        regular = [(FULL_ATTENTION if full(i) else RECURRENT)[0] for i in places(before)]
        given = fields.take("layer_types", regular)
        return {"layer_types": words(given, before["num_layers"], recurrent)}

    return Entry(found, lambda config: {"layer_types": in_words(config, recurrent)})


def read_rope(fields: Fields, share: float) -> Options:
    """Wavelengths and the share of channels that turn; a class that turns all knows no other."""
    fields.only("rope_scaling", None)
    rope = fields.inside("rope_parameters")
    rope.only("rope_type", "default")
    # Of images and videos; the positions of text are the same on all axes.
    rope.drop("mrope_section", "mrope_interleaved", "type")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    factor = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", share))
    if share == 1 != factor:
        raise ValueError(f"partial_rotary_factor must be 1 in this family, got {factor}")
    rope.done()
    return {"rope_theta": float(theta), "partial_rotary_factor": factor}


def write_rope(config: ModelConfig) -> Options:
    rope = {"rope_theta": config.rope_theta, "partial_rotary_factor": config.partial_rotary_factor}
    return {"rope_parameters": {"rope_type": "default"} | rope}


def rope(share: float) -> Entry:
    """Positions of attention, of which `share` of the channels turn where nothing says it."""
    return Entry(lambda fields, found: read_rope(fields, share), write_rope)
