"""Hybrids of Gated DeltaNet and attention: Qwen3-Next, Qwen3.5, with and without experts, OLMo.

Qwen3-Next stores q, k, v and gate of a linear layer in one matrix, key head by key head, and its
b and a likewise; Qwen3.5 keeps them apart. Both store each head of attention's query with its gate.
OLMo-hybrid has norms before Gated DeltaNet, and norms after attention, which has no positions.
"""

from collections.abc import Callable

from deltarule.models.block import mlp_kinds
from deltarule.models.config import ModelConfig
from deltarule.models.convert import names, options
from deltarule.models.convert.hybrid import layers, places, read_rope, rope, stream, write_rope
from deltarule.models.convert.names import MLP, Names, Rows, Tensors, same, under
from deltarule.models.convert.options import Entry, Family, Fields, Options, Table, fixed, integer

# Of what stands beside the language model, and of the heads that predict further tokens.
BESIDE = (
    "image_token_id", "video_token_id", "vision_config", "vision_end_token_id",
    "vision_start_token_id",
)  # fmt: skip
FURTHER = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "language_model_only")
EXPERTS = (
    "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size",
)  # fmt: skip


def last_of_several(fields: Fields) -> Callable[[int], bool]:
    """Attention at the end of each so many layers."""
    every = fields.integer("full_attention_interval", 4, smallest=1)
    return lambda i: (i + 1) % every == 0


# Layers and their sizes; after the stream.
GATED_DELTANET = (
    layers("gated_deltanet", last_of_several),
    integer("linear_conv_kernel_dim", "conv_size", 4, smallest=1),
    fixed({"output_gate": True}, {"hidden_act": "silu"}),
)


def read_text(fields: Fields, found: Options) -> None:
    """Go on with the language model of a folder, alone or beside a vision tower."""
    if fields.has("text_config"):
        text, tied = fields.inside("text_config"), fields.take("tie_word_embeddings")
        fields.drop(*BESIDE)
        fields.done()
        fields.left = text.left | ({} if tied is None else {"tie_word_embeddings": tied})


def read_experts(fields: Fields, found: Options) -> Options:
    """Each layer but those named has experts, one shared expert among them."""
    dense = fields.listed("mlp_only_layers", [])
    step = fields.integer("decoder_sparse_step", 1, smallest=1)
    sizes = {name: fields.integer(name, 0) for name in EXPERTS}
    sparse = [
        i not in dense and (i + 1) % step == 0 and sizes["num_experts"] > 0 for i in places(found)
    ]
    normed = fields.flag("norm_topk_prob", True)
    if not any(sparse):
        return {}
    kinds = tuple("sparse" if there else "dense" for there in sparse)
    own = {"mlp_layer_types": kinds, "norm_topk_prob": normed, "shared_expert_gate": True}
    return sizes | own


def write_experts(config: ModelConfig) -> Options:
    dense = [i for i, kind in enumerate(mlp_kinds(config)) if kind == "dense"]
    sizes = {name: getattr(config, name) or 0 for name in EXPERTS}
    sizes |= {"norm_topk_prob": config.norm_topk_prob, "mlp_only_layers": dense}
    return sizes | {"decoder_sparse_step": 1}


def all_sparse(config: ModelConfig) -> None:
    if "dense" in mlp_kinds(config):
        raise ValueError("mlp_layer_types must be sparse in every layer")


def qwen(*experts: Entry) -> Table:
    return (
        options.only({"attn_output_gate": True}),
        options.silent(*FURTHER),
        *stream(),
        *GATED_DELTANET,
        *experts,
        integer(
            "intermediate_size", "mlp_size", lambda found: 0 if "num_experts" in found else None
        ),
        rope(0.25),
        integer("linear_num_key_heads", "num_heads", 16),
        integer("linear_num_value_heads", "num_v_heads", 32),
        integer("linear_key_head_dim", "head_k_dim", 128),
        integer("linear_value_head_dim", "head_v_dim", 128),
        integer(
            "head_dim", "attention_head_dim", 256,
            value=lambda config: config.attention_head_dim or config.head_v_dim,
        ),
        fixed({
            "beta_max": 1.0, "attention_qk_norm": "head", "attention_gate": True,
            "zero_centered_norm": True,
        }),
    )  # fmt: skip


def tensors(recurrent: Names) -> Tensors:
    """What the tensors of Qwen are called; the matrices of a linear layer differ."""
    return Tensors(layer={
        "": names.NORMS,
        "gated_deltanet": under("linear_attn.", {
            **recurrent, "conv1d": "q_conv k_conv v_conv", "norm": "o_norm", "out_proj": "o_proj",
            **same("A_log", "dt_bias"),
        }, "mixer."),
        "attention": under("self_attn.", {
            "q_proj": Rows("q_proj g_proj", groups="num_attention_heads"),
            **same("k_proj", "v_proj", "o_proj", "q_norm", "k_norm"),
        }, "mixer."),
        "dense": under("mlp.", MLP, "mlp."),
        "sparse": under("mlp.", {
            "gate": "router", "shared_expert_gate": "shared_gate", "experts.": names.Experts(),
            **under("shared_expert.", MLP, "shared."),
        }, "mlp."),
    })  # fmt: skip


JOINED = tensors({
    "in_proj_qkvz": Rows("q_proj k_proj v_proj g_proj", groups="num_heads"),
    "in_proj_ba": Rows("b_proj a_proj", groups="num_heads"),
})  # fmt: skip
APART = tensors({
    "in_proj_qkv": "q_proj k_proj v_proj", "in_proj_z": "g_proj", "in_proj_b": "b_proj",
    "in_proj_a": "a_proj",
})  # fmt: skip
TEXT = Entry(read_text)
SPARSE = Entry(read_experts, write_experts)


def read_positions(fields: Fields, found: Options) -> Options:
    """Positions of OLMo, if they are given, and a size of heads that is never written."""
    rope = {"partial_rotary_factor": 0.0}
    if fields.has("rope_parameters") or fields.has("rope_theta"):
        rope = read_rope(fields, 1.0)
    size = found["hidden_size"] // found["num_attention_heads"]
    return rope | {"attention_head_dim": fields.integer("head_dim", size)}


OLMO = (
    *stream(),
    *GATED_DELTANET,
    integer("intermediate_size", "mlp_size"),
    Entry(
        read_positions,
        lambda c: write_rope(c) if c.partial_rotary_factor else {"rope_parameters": None},
    ),
    integer(
        "linear_num_key_heads", "num_heads", lambda found: found["num_attention_heads"], smallest=1
    ),
    integer("linear_num_value_heads", "num_v_heads", lambda found: found["num_attention_heads"]),
    integer(
        "linear_key_head_dim", "head_k_dim",
        lambda found: int(0.75 * found["hidden_size"] / found["num_heads"]),
    ),
    integer("linear_value_head_dim", "head_v_dim", lambda found: 2 * found["head_k_dim"]),
    options.negative("linear_allow_neg_eigval", True),
    # The output norm of a linear layer has its own eps, whatever rms_norm_eps is.
    fixed({"attention_qk_norm": "all", "output_norm_eps": 1e-5}),
    options.where(
        lambda found: "attention" in found["layer_types"], (fixed({"post_norm": "attention"}),)
    ),
)  # fmt: skip
RECURRENT = {
    **same(*(f"{letter}_proj" for letter in "qkvbago"), "A_log", "dt_bias", "o_norm"),
    **names.CONVOLUTIONS,
}
NORMED_AFTER = Tensors(layer={
    "gated_deltanet": {
        "attention_layer_norm": "mixer_norm", "feedforward_layer_norm": "mlp_norm",
        **under("linear_attn.", RECURRENT, "mixer."),
    },
    "attention": {
        # transformers writes this norm under the name of another.
        "post_attention_layernorm|feedforward_layer_norm": "mixer_norm",
        "post_feedforward_layernorm": "mlp_norm",
        **names.ATTENTION, **under("self_attn.", same("q_norm", "k_norm"), "mixer."),
    },
    "dense": under("mlp.", MLP, "mlp."),
})  # fmt: skip

FAMILIES = (
    Family(
        model_type="qwen3_next", architecture="Qwen3NextForCausalLM", options=qwen(SPARSE),
        tensors=JOINED, ignored=("mtp.",),
    ),
    Family(
        model_type="qwen3_5_text", architecture="Qwen3_5ForCausalLM", aliases=("qwen3_5",),
        options=(TEXT, *qwen()), tensors=APART, ignored=("mtp.", "visual."),
    ),
    Family(
        model_type="qwen3_5_moe_text", architecture="Qwen3_5MoeForCausalLM",
        aliases=("qwen3_5_moe",), options=(TEXT, *qwen(SPARSE)), tensors=APART,
        ignored=("mtp.", "visual."), check=all_sparse,
        # Its class divides by the sum of the chosen scores, whatever config.json says.
        unwritten=("mlp_only_layers", "decoder_sparse_step", "norm_topk_prob", "intermediate_size"),
    ),
    Family(
        model_type="olmo_hybrid", architecture="OlmoHybridForCausalLM", options=OLMO,
        tensors=NORMED_AFTER,
    ),
)  # fmt: skip
