"""xLSTM-7B: mLSTM with bounded gates, and bounded logits."""

from deltarule.models.config import ModelConfig
from deltarule.models.convert import options
from deltarule.models.convert.names import Tensors, under
from deltarule.models.convert.options import Entry, Family, Fields, Options
from deltarule.nn.mlstm import EPS, SOFT_CAP


def rounded(size: float, multiple: int) -> int:
    return int((size + multiple - 1) // multiple * multiple)


def read_factors(fields: Fields, found: Options) -> Options:
    hidden = found["hidden_size"]
    qk, v = (
        rounded(hidden * fields.number(name, otherwise), 64) // found["num_heads"]
        for name, otherwise in (("qk_dim_factor", 0.5), ("v_dim_factor", 1.0))
    )
    multiple = fields.integer("ffn_round_up_to_multiple_of", 64, smallest=1)
    inner = rounded(hidden * fields.number("ffn_proj_factor", 2.667), multiple)
    return {"head_k_dim": qk, "head_v_dim": v, "mlp_size": inner}


def write_factors(config: ModelConfig) -> Options:
    hidden, heads = config.hidden_size, config.num_heads
    return {
        "qk_dim_factor": heads * (config.head_k_dim or 0) / hidden,
        "v_dim_factor": heads * (config.head_v_dim or 0) / hidden,
        # Multiples of 1 are rounded down: with half a channel more never one less.
        "ffn_proj_factor": ((config.mlp_size or 0) + 0.5) / hidden,
        "ffn_round_up_to_multiple_of": 1,
    }


OPTIONS = (
    options.only({
        "add_out_norm": True, "eps": EPS, "gate_soft_cap": SOFT_CAP, "use_bias": False,
        "weight_mode": "single",
    }),
    options.older({"num_blocks": "num_hidden_layers"}),
    options.silent("embedding_dim", "mode"),
    *options.sizes(),
    options.integer("num_heads", default=8, smallest=1),
    Entry(read_factors, write_factors),
    options.fixed({"layer_types": "xlstm_7b", "output_norm_bias": False}),
    options.number("norm_eps", "norm_eps", 1e-6),
    options.number("output_logit_soft_cap", "final_logit_softcapping", 30.0),
    options.tied(False),
)  # fmt: skip

MIXER = {
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "ogate_preact": "g_proj",
    "fgate_preact": "a_proj", "fgate_preact.bias": "decay_bias",
    "igate_preact": "b_proj", "igate_preact.bias": "beta_bias",
    "multihead_norm": "o_norm", "out_proj": "o_proj",
}  # fmt: skip
MLP = {"proj_up_gate": "gate_proj", "proj_up": "up_proj", "proj_down": "down_proj"}

FAMILY = Family(
    model_type="xlstm", architecture="xLSTMForCausalLM", options=OPTIONS,
    tensors=Tensors(
        root="backbone.", embedding="embeddings", norm="out_norm", layers="blocks",
        layer={
            "": {"norm_mlstm": "mixer_norm", "norm_ffn": "mlp_norm"},
            "xlstm_7b": under("mlstm_layer.", MIXER, "mixer."),
            "dense": under("ffn.", MLP, "mlp."),
        },
    ),
)  # fmt: skip
