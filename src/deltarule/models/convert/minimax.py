"""MiniMax-01: Lightning Attention and attention, each layer with experts, in blocks of DeepNorm."""

from deltarule.models.config import ModelConfig
from deltarule.models.convert import options
from deltarule.models.convert.hybrid import layers, rope, stream
from deltarule.models.convert.names import ATTENTION, NORMS, Experts, Names, Rows, Tensors, under

BRANCHES = ("full_attn", "linear_attn", "mlp")


def read_heads(fields: options.Fields, found: options.Options) -> options.Options:
    """Both kinds of layers have the same heads.

    The scores of Lightning Attention are not divided by head_dim^1/2 there; a norm follows, so that
    its eps is divided here instead.
    """
    heads = found["num_attention_heads"]
    if heads & (heads - 1):
        raise ValueError(f"num_attention_heads must be a power of two for its slopes, got {heads}")
    size = fields.integer("head_dim", found["hidden_size"] // heads, smallest=1)
    sizes = dict.fromkeys(("head_k_dim", "head_v_dim", "attention_head_dim"), size)
    # The norm of all heads together has its own eps, whatever rms_norm_eps is.
    return {"num_heads": heads, "output_norm_eps": 1e-6 / size, **sizes}


def read_factors(fields: options.Fields, found: options.Options) -> options.Options:
    """What the normed stream is multiplied by, and every branch."""
    alphas, betas = (
        {fields.factor(f"{branch}_{letter}_factor") for branch in BRANCHES}
        for letter in ("alpha", "beta")
    )
    if len(alphas) > 1 or len(betas) > 1:
        raise ValueError(
            f"alpha and beta factors of {', '.join(BRANCHES)} must be one number each, "
            f"got {sorted(alphas)} and {sorted(betas)}: CausalLM has no option for that"
        )
    return {"deepnorm_alpha": float(alphas.pop()), "residual_multiplier": float(betas.pop())}


def write_factors(config: ModelConfig) -> options.Options:
    factors = {"alpha": config.deepnorm_alpha or 1.0, "beta": config.residual_multiplier}
    return {f"{x}_{letter}_factor": y for x in BRANCHES for letter, y in factors.items()}


OPTIONS = (
    options.only({"sliding_window": None}),
    # How its own class cuts a sequence.
    options.silent("block_size"),
    *stream(otherwise=1e-5),
    options.Entry(read_heads, lambda config: {"head_dim": config.head_k_dim}),
    layers("lightning", lambda fields: lambda i: i % 2 == 0),
    options.Entry(read_factors, write_factors),
    rope(1.0),
    options.integer("intermediate_size", "moe_intermediate_size", smallest=1),
    options.integer("num_local_experts", "num_experts", 8),
    options.integer("num_experts_per_tok", default=2),
    options.fixed({"mlp_layer_types": "sparse", "output_norm": "all", "output_gate": True}),
)

LIGHTNING: Names = {
    "qkv_proj": Rows("q_proj k_proj v_proj", groups="num_heads"), "output_gate": "g_proj",
    "norm": "o_norm", "out_proj": "o_proj",
}  # fmt: skip
EXPERTS: Names = {"gate": "router", "experts.": Experts(("w1", "w3", "w2"))}

FAMILY = options.Family(
    model_type="minimax", architecture="MiniMaxForCausalLM", options=OPTIONS,
    # What follows from the number of heads and the place of a layer.
    derived=("slope_rate", "query_decay", "key_decay", "diagonal_decay"),
    tensors=Tensors(layer={
        "": NORMS,
        "lightning": under("self_attn.", LIGHTNING, "mixer."),
        "attention": ATTENTION,
        "sparse": under("block_sparse_moe.", EXPERTS, "mlp."),
    }),
)  # fmt: skip
