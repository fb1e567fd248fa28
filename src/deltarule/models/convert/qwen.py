"""Qwen3-Next and Qwen3.5, with and without experts: Gated DeltaNet and gated attention.

Qwen3-Next stores q, k, v and gate of a linear layer in one matrix, key head by key head, and its
b and a likewise; Qwen3.5 keeps them apart. Both store each head of attention's query with its gate.
"""

from deltarule.models.block import mlp_kinds
from deltarule.models.config import ModelConfig
from deltarule.models.convert.family import Family
from deltarule.models.convert.fields import Fields
from deltarule.models.convert.hybrid import GATED_DELTANET, MOST_LAYERS, rope, stream
from deltarule.models.convert.names import MLP, NORMS, Experts, Names, Rows, Tensors, same, under
from deltarule.models.convert.options import Entry, Options, Table, fixed, integer, only, silent

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


def read_text(fields: Fields, found: Options) -> Options:
    """Go on with the language model of a folder, alone or beside a vision tower."""
    if fields.has("text_config"):
        text, tied = fields.inside("text_config"), fields.take("tie_word_embeddings")
        fields.drop(*BESIDE)
        fields.done()
        fields.go_on(text, {} if tied is None else {"tie_word_embeddings": tied})
    return {}


def read_experts(fields: Fields, found: Options) -> Options:
    """Each layer but those named has experts, one shared expert among them."""
    dense = fields.listed("mlp_only_layers", [])
    step = fields.integer("decoder_sparse_step", 1, smallest=1)
    layers = range(min(found["num_layers"], MOST_LAYERS))
    sizes = {name: fields.integer(name, 0) for name in EXPERTS}
    sparse = [i not in dense and (i + 1) % step == 0 and sizes["num_experts"] > 0 for i in layers]
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


def options(*experts: Entry) -> Table:
    return (
        only({"attn_output_gate": True}),
        silent(*FURTHER),
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
    """What the tensors are called; the matrices of a linear layer differ."""
    return Tensors(layer={
        "": NORMS,
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
            "gate": "router", "shared_expert_gate": "shared_gate", "experts.": Experts(),
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

FAMILIES = (
    Family(
        model_type="qwen3_next", architecture="Qwen3NextForCausalLM", options=options(SPARSE),
        tensors=JOINED, ignored=("mtp.",),
    ),
    Family(
        model_type="qwen3_5_text", architecture="Qwen3_5ForCausalLM", aliases=("qwen3_5",),
        options=(TEXT, *options()), tensors=APART, ignored=("mtp.", "visual."),
    ),
    Family(
        model_type="qwen3_5_moe_text", architecture="Qwen3_5MoeForCausalLM",
        aliases=("qwen3_5_moe",), options=(TEXT, *options(SPARSE)), tensors=APART,
        ignored=("mtp.", "visual."), check=all_sparse,
        # Its class divides by the sum of the chosen scores, whatever config.json says.
        unwritten=("mlp_only_layers", "decoder_sparse_step", "norm_topk_prob", "intermediate_size"),
    ),
)  # fmt: skip
