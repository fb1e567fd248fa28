"""OLMo-hybrid: Gated DeltaNet with norms before, attention without positions with norms after."""

from deltarule.models.config import ModelConfig
from deltarule.models.convert.family import Family
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.hybrid import GATED_DELTANET, read_rope, stream, write_rope
from deltarule.models.convert.names import ATTENTION, CONVOLUTIONS, MLP, Tensors, same, under
from deltarule.models.convert.options import Entry, Options, fixed, integer, negative

# Of the output norm of a linear layer, whatever rms_norm_eps is.
OUTPUT_NORM_EPS = 1e-5


def read_positions(fields: Fields, found: Options) -> Options:
    """Positions, if they are given, and a size of heads that is never written."""
    rope = {"partial_rotary_factor": 0.0}
    if fields.has("rope_parameters") or fields.has("rope_theta"):
        rope = read_rope(fields, 1.0)
    size = found["hidden_size"] // found["num_attention_heads"]
    return rope | {"attention_head_dim": fields.integer("head_dim", size)}


def write_positions(config: ModelConfig) -> Options:
    return write_rope(config) if config.partial_rotary_factor else {"rope_parameters": None}


OPTIONS = (
    *stream(),
    *GATED_DELTANET,
    integer("intermediate_size", "mlp_size"),
    Entry(read_positions, write_positions),
    integer(
        "linear_num_key_heads", "num_heads", lambda found: found["num_attention_heads"], smallest=1
    ),
    integer("linear_num_value_heads", "num_v_heads", lambda found: found["num_attention_heads"]),
    integer(
        "linear_key_head_dim", "head_k_dim",
        lambda found: int(0.75 * found["hidden_size"] / found["num_heads"]),
    ),
    integer("linear_value_head_dim", "head_v_dim", lambda found: 2 * found["head_k_dim"]),
    negative("linear_allow_neg_eigval", True),
    fixed({
        "attention_qk_norm": "all", "output_norm_eps": OUTPUT_NORM_EPS, "post_norm": "attention",
    }),
)  # fmt: skip

RECURRENT = {
    **same(*(f"{letter}_proj" for letter in "qkvbago"), "A_log", "dt_bias", "o_norm"),
    **CONVOLUTIONS,
}
TENSORS = Tensors(layer={
    "gated_deltanet": {
        "attention_layer_norm": "mixer_norm", "feedforward_layer_norm": "mlp_norm",
        **under("linear_attn.", RECURRENT, "mixer."),
    },
    "attention": {
        # transformers writes this norm under the name of another.
        "post_attention_layernorm|feedforward_layer_norm": "mixer_norm",
        "post_feedforward_layernorm": "mlp_norm",
        **ATTENTION, **under("self_attn.", same("q_norm", "k_norm"), "mixer."),
    },
    "dense": under("mlp.", MLP, "mlp."),
})  # fmt: skip

FAMILY = Family(
    model_type="olmo_hybrid", architecture="OlmoHybridForCausalLM", options=OPTIONS, tensors=TENSORS
)
