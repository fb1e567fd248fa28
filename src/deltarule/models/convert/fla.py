"""Research checkpoints in the layout of flash-linear-attention: names are exchanged, no value is.

Each family is one mixer in every block; the rest of the model is the same for all of them.
"""

from collections.abc import Mapping
from types import MappingProxyType

from deltarule.models.config import ModelConfig
from deltarule.models.convert import options
from deltarule.models.convert.names import MLP, Names, Rows, Tensors, flat, same, under
from deltarule.models.convert.options import Entry, Family, Fields, Options, Table
from deltarule.nn.checks import check_that
from deltarule.nn.state import MOST_LAYERS


def stream(hidden_ratio: float = 4) -> Table:
    """What all families of this layout share.

    The MLP is `hidden_ratio` times 2/3 of the stream wide, up to a multiple of 256, where no width
    is given.
    """

    def read_inner(fields: Fields, found: Options) -> Options:
        wide = int(found["hidden_size"] * fields.number("hidden_ratio", hidden_ratio) * 2 / 3)
        return {"mlp_size": fields.integer("intermediate_size", 256 * -(-wide // 256), smallest=1)}

    return (
        options.only({"hidden_act": ("swish", "silu"), "attnres_block_size": None}),
        *options.sizes(vocab_size=32000),
        Entry(read_inner, lambda config: {"intermediate_size": config.mlp_size}),
        options.number("norm_eps", "norm_eps", 1e-6),
        options.tied(False),
        options.fixed(there={"hidden_act": "swish"}),
    )


STREAM = stream()
ATTENTION = ("attention", "sliding_window")


def convolved(used: bool) -> Entry:
    def read_taps(fields: Fields, found: Options) -> Options:
        taps = fields.integer("conv_size", 4)
        fields.only("conv_bias", False)
        return {"conv_size": taps if fields.flag("use_short_conv", used) else 0}

    return Entry(read_taps, lambda config: {
        "use_short_conv": config.conv_size != 0, "conv_size": config.conv_size or 4,
    })  # fmt: skip


def shares(k: float, v: float) -> Table:
    """Heads whose channels are given as shares of the stream."""

    def share(theirs: str, ours: str, otherwise: float) -> Entry:
        def read_size(fields: Fields, found: Options) -> Options:
            heads, size = found["num_heads"], found["hidden_size"]
            size = round(size * fields.number(theirs, otherwise))
            if heads < 1 or size % heads:
                raise ValueError(
                    f"{theirs} must give {heads} heads equal channels, got {size} in all"
                )
            return {ours: size // heads}

        return Entry(read_size, lambda config: {
            theirs: config.num_heads * (getattr(config, ours) or 0) / config.hidden_size
        })  # fmt: skip

    return (
        options.integer("num_heads"),
        share("expand_k", "head_k_dim", k),
        share("expand_v", "head_v_dim", v),
    )


def sized(heads: int, size: int, expand_v: float) -> Table:
    return (
        options.integer("num_heads", default=heads),
        options.integer("head_dim", "head_k_dim", size),
        Entry(
            lambda fields, found: {
                "head_v_dim": int(found["head_k_dim"] * fields.number("expand_v", expand_v))
            },
            lambda config: {"expand_v": (config.head_v_dim or 1) / (config.head_k_dim or 1)},
        ),
    )


VALUE_HEADS = options.integer("num_v_heads", default=lambda found: found["num_heads"])
NEGATIVE = options.negative("allow_neg_eigval", False)


def read_bound(fields: Fields, found: Options) -> Options:
    """KDA's lower bound of a log decay; kernels may count on it, and so only if there is one."""
    bound = fields.take("lower_bound")
    if fields.flag("safe_gate", False) and bound is None:
        raise ValueError("lower_bound must be given with safe_gate, got None")
    return {"gate_lower_bound": bound}


def write_bound(config: ModelConfig) -> Options:
    """Back from `read_bound`; -5 is as far as those kernels go."""
    bound = config.gate_lower_bound
    return {} if bound is None else {"safe_gate": bound >= -5, "lower_bound": bound}


def read_attention(fields: Fields, found: Options) -> Options:
    if not fields.has("attn"):
        fields.drop("attn")
        return {}
    inside, mixer, count = fields.inside("attn"), found["layer_types"], found["num_layers"]
    layers = inside.listed("layers", [])
    if count > MOST_LAYERS or not all(x in range(count) for x in layers):
        raise ValueError(f"attn: layers must number some of {count} from 0, got {layers}")
    heads, window = inside.integer("num_heads", smallest=1), None
    if inside.has("window_size"):
        window = inside.integer("window_size", smallest=1)
    inside.drop("window_size")
    own = "attention" if window is None else "sliding_window"
    theirs = {
        "layer_types": tuple(own if i in layers else mixer for i in range(count)),
        "num_attention_heads": heads, "num_kv_heads": inside.integer("num_kv_heads", heads),
        "window": window, "rope_theta": float(inside.number("rope_theta", 10000.0)),
    }  # fmt: skip
    inside.only("qkv_bias", False)
    inside.done()
    return theirs


def write_attention(config: ModelConfig) -> Options:
    layers = [i for i, name in enumerate(config.layer_types) if name in ATTENTION]
    own = {
        "layers": layers, "num_heads": config.num_attention_heads, "window_size": config.window,
        "num_kv_heads": config.num_kv_heads, "rope_theta": config.rope_theta, "qkv_bias": False,
    }  # fmt: skip
    return {"attn": own} if layers else {}


def read_ratio(fields: Fields, found: Options) -> Options:
    hidden, heads = found["hidden_size"], None
    if fields.has("num_heads"):
        heads = fields.integer("num_heads", smallest=1)
    fields.drop("num_heads")
    ratio = fields.integer("expand_ratio", hidden // heads if heads else 128, smallest=1)
    check_that(hidden % ratio == 0, f"expand_ratio must divide hidden_size={hidden}", ratio)
    own = hidden // ratio
    check_that(heads in (None, own), f"num_heads must be {own} with expand_ratio", heads)
    return {"num_heads": own, "head_k_dim": ratio, "head_v_dim": ratio}


def family(
    model_type: str,
    architecture: str,
    *own: Entry,
    mixers: tuple[str, ...] = (),
    common: Table = STREAM,
    renamed: Mapping[str, str] = MappingProxyType({}),
    norm: Names = MappingProxyType({"o_norm": "o_norm"}),
    model: Names = MappingProxyType({}),
    hybrid: bool = True,
) -> Family:
    """One family, from what differs: `own` options of the mixer, and `common` ones of the rest.

    Of its mixers here the first is what config.json means unless an entry says another. `renamed`
    are its submodules of other names, by ours, `norm` is that of an output; `model` has names of
    the model beside the usual ones. A `hybrid` mixes in attention.
    """
    mixers = mixers or (model_type,)
    # Every parameter that some mixer of these families has.
    names = {"A_log": "A_log", "dt_bias": Rows("dt_bias", form=flat), **norm}
    for letter in "qkvabgo":
        proj, conv = (renamed.get(x, x) for x in (f"{letter}_proj", f"{letter}_conv"))
        names |= {f"{proj}{part}": f"{letter}_proj{part}" for part in ("", ".0", ".1")}
        names[f"{conv}1d"] = f"{letter}_conv"
    layer = {
        "": {"attn_norm": "mixer_norm", "mlp_norm": "mlp_norm", **under("mlp.", MLP, "mlp.")},
        **dict.fromkeys(mixers, under("attn.", names, "mixer.")),
    }
    if hybrid:
        attention = under("attn.", same(*(f"{letter}_proj" for letter in "qkvo")), "mixer.")
        layer |= dict.fromkeys(ATTENTION, attention)
    mixed = Entry(read_attention, write_attention) if hybrid else options.only({"attn": None})
    return Family(
        model_type=model_type, architecture=architecture,
        options=(options.fixed({"layer_types": mixers[0]}), *common, *own, mixed),
        tensors=Tensors(embedding="embeddings", model=model, layer=layer),
    )  # fmt: skip


ACTIVATIONS = {"silu": None, "elu": "elu", "relu": "relu", "identity": "identity"}
FEATURE_MAPS = {"identity": None, "elu": "elu", "relu": "relu"}
GATED = options.flag("use_output_gate", "output_gate", True)
HEADS_ALIKE = options.only({"num_kv_heads": None})
WRITES = ("gated_delta_product", "delta_product")
SWISH_NORM = {
    "g_norm_swish_gate": Rows("o_norm", gated=True), "g_norm": Rows("o_norm", gated=False)
}  # fmt: skip

FAMILIES = (
    family(
        "delta_net", "DeltaNetForCausalLM",
        options.only({"use_beta": True, "use_output_norm": True}),
        options.word("qk_activation", ACTIVATIONS, "silu", "feature_map"),
        options.word("qk_norm", {"l2": None, "sum": "l1"}, "l2"),
        *shares(1, 1), convolved(True), options.flag("use_gate", "output_gate", False), NEGATIVE,
        mixers=("deltanet",),
    ),
    family(
        "gated_deltanet", "GatedDeltaNetForCausalLM",
        options.only({"output_gate_activation": ("swish", "silu")}),
        *sized(6, 256, 2), VALUE_HEADS, convolved(True), NEGATIVE,
        options.flag("use_gate", "output_gate", True),
    ),
    family(
        "kda", "KDAForCausalLM",
        *sized(16, 128, 1), VALUE_HEADS, convolved(True), Entry(read_bound, write_bound), NEGATIVE,
        options.fixed({"output_gate": True}),
        renamed={"a_proj": "f_proj"},
    ),
    family(
        "gated_deltaproduct", "GatedDeltaProductForCausalLM",
        Entry(
            lambda fields, found: {
                "layer_types": WRITES[0 if fields.flag("use_forget_gate", False) else 1]
            },
            lambda config: {"use_forget_gate": WRITES[0] in config.layer_types},
        ),
        *sized(6, 256, 2), options.integer("num_householder", "n_steps", 1), convolved(True), GATED,
        NEGATIVE,
        mixers=WRITES,
    ),
    family(
        "gla", "GLAForCausalLM",
        options.only({"use_gk": True, "use_gv": False, "clamp_min": None, "feature_map": None}),
        HEADS_ALIKE, *shares(0.5, 1), GATED, convolved(False),
        renamed={"a_proj": "gk_proj"}, norm=SWISH_NORM,
    ),
    family(
        "retnet", "RetNetForCausalLM",
        options.only({"feature_map": None}), HEADS_ALIKE, *shares(1, 2), GATED,
        # Its layers have no convolution whatever its options say.
        options.silent("use_short_conv", "conv_size"), options.fixed({"conv_size": 0}),
        # Its own wavelengths are not those of attention.
        common=stream(hidden_ratio=2), norm=SWISH_NORM, hybrid=False,
    ),
    family(
        "linear_attn", "LinearAttentionForCausalLM",
        options.only({"norm_q": False, "norm_k": False, "norm_feature_map": False,
              "tie_feature_map_qk": False}),
        HEADS_ALIKE, *shares(1, 1),
        # What is not said is a map that is none of these.
        options.word("feature_map", FEATURE_MAPS, "elementwise_product"),
        mixers=("linear_attention",), norm={"norm": "o_norm"},
    ),
    family(
        "hgrn2", "HGRN2ForCausalLM",
        options.only({"use_lower_bound": True}),
        Entry(read_ratio, lambda config: {
            "num_heads": config.num_heads, "expand_ratio": config.head_k_dim,
        }),
        convolved(False),
        # The norm of the output has its own eps, whatever norm_eps says.
        options.fixed({"output_gate": False, "output_norm_eps": 1e-5}, {"use_lower_bound": True}),
        renamed={"k_proj": "f_proj", "v_proj": "i_proj", "k_conv": "f_conv", "v_conv": "i_conv"},
        norm={"g_norm": "o_norm"},
        # The least decays of all layers lie together, as they do here.
        model={"model.lower_bounds": Rows(
            "blocks.0.mixer.bound_logits", form=lambda shape: (shape[0], shape[1] * shape[2])
        )},
        hybrid=False,
    ),
)  # fmt: skip
