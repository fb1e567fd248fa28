"""The one configuration of the one language model."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deltarule.json_file import parse_object
from deltarule.models.config_checks import check_fields, check_used
from deltarule.models.patterns import expand_layer_types, repeat
from deltarule.nearest import check_known, nearest
from deltarule.nn.checks import of_python
from deltarule.nn.experts import Scores
from deltarule.nn.mlp import HiddenActivation
from deltarule.nn.rule import OutputNorm, QueryKeyNorm

MODEL_TYPE = "deltarule"
ARCHITECTURE = "DeltaruleForCausalLM"
# One folder serves transformers, too, which reads some names from every configuration and gives
# `layer_types` words of its own. Ours: theirs; `mixers` is a name of nobody's.
RENAMED = {
    "num_layers": "num_hidden_layers", "layer_types": "mixers",
    "tie_embeddings": "tie_word_embeddings",
}  # fmt: skip
# What transformers writes beside a model's own options, for itself.
THEIRS = (
    "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "is_encoder_decoder", "label2id", "output_attentions", "output_hidden_states", "pad_token_id",
    "problem_type", "return_dict", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and layers of a `CausalLM`; None leaves an option at each layer's own default.

    Args:
        vocab_size: Tokens; 257 for `deltarule.models.bytes`.
        hidden_size: Channels of the residual stream.
        num_layers: Blocks, each a mixer and an MLP.
        layer_types: The mixer of each block, by its name in `deltarule.nn.MIXERS`: one name, or
            a pattern whose length divides num_layers and that repeats; or a published pattern by
            its name in `deltarule.models.PATTERNS`. "mlp", "moe" (experts) or "channel_mix" (an
            MLP that mixes each token with the one before) may take a mixer's place, and parts
            joined by + run side by side, such as "mamba2+attention". Kept as a tuple of num_layers
            names.
        num_heads: Query and key heads.
        num_v_heads: Value heads of recurrent layers, a multiple of num_heads. None: num_heads.
        head_k_dim: Channels of a query or key of recurrent layers. None: the layer's default.
        head_v_dim: Channels of a value of recurrent layers. None: the layer's default.
        num_attention_heads: Query heads of attention. None: num_heads.
        num_kv_heads: Key and value heads of attention, a divisor of its query heads. None: one for
            each query head.
        attention_head_dim: Channels of a head of attention. None: hidden_size over its query heads.
        attention_qk_norm: Norm of attention's q and k: "head", each head by itself; "all", all
            heads together. None: no norm.
        kv_lora_rank: Channels of the vector from which full attention computes keys and values,
            and which its state keeps (latent attention). None: from x.
        qk_nope_head_dim: Channels of a query or key of latent attention that are a head's own.
        qk_rope_head_dim: Channels of a key of latent attention that all heads share.
        v_head_dim: Channels of a value of latent attention.
        attention_gate: Whether attention multiplies its output by sigmoid of a projection of x.
        partial_rotary_factor: Share of a head's channels, the first ones, that attention rotates
            by position, in [0, 1]; 0: no positions.
        conv_size: Tokens that the short convolution of recurrent layers reads; 0 removes it. None:
            the layer's default.
        conv_bias: Whether that convolution adds a bias before its SiLU. None: it does not.
        n_groups: Key heads of Mamba-2 layers, a divisor of their heads.
        output_gate: Whether recurrent layers gate their output. None: the layer's default.
        output_gate_bias: Whether that gate of KDA layers has a bias.
        beta_max: Largest write strength of delta layers; 2.0 allows negative eigenvalues. None:
            the layer's default.
        longest_horizon: Initial memory, in tokens, of the slowest head of layers with a decay per
            head or channel; heads are spread from 8 tokens to it. None: each paper's draw.
        gate_lower_bound: Smallest log_decay of KDA layers, a number < 0. None: no bound.
        n_steps: Writes per token in DeltaProduct layers. None: the layer's default.
        num_slots: Slots of a head in ABC, GSA and multi-head DeltaNets. None: the layer's default.
        feature_map: Function of q and k in linear attention, Gated RFA and the delta layers, by its
            name in `deltarule.nn.feature_maps`. None: the layer's default.
        qk_norm: Norm that divides q and k in those layers: "none", "l1" or "l2". None: the layer's
            default.
        output_norm: Norm of the output of delta layers and Lightning Attention: "head", each head
            by itself; "all", all heads together; "none", no norm. None: each head.
        normalizer: Whether linear attention divides its output by z^T q. None: the layer's default.
        filter_size: Length of Hyena's filters in tokens. None: the layer's default.
        mini_batch: Tokens whose inner gradients TTT and Titans take at the same memory. None: 16.
        spectrum: Initial complex eigenvalues of S4D: "legs", "inv" or "lin". None: "legs".
        window: Tokens that attention sees in sliding-window layers and in Titans' blocks. None: the
            layer's default.
        num_persistent: Learned tokens before every document in Titans' blocks. None: 4.
        rope_theta: Base of the rotary position wavelengths of attention and RetNet.
        mlp_size: Channels inside the MLP. None: 8/3 of hidden_size, up to a multiple of 16;
            0: no MLP.
        mlp_layer_types: The second half of each block: "dense", an MLP; "sparse", a mixture of
            experts; "none". One of them, or a pattern that repeats, as for layer_types. None:
            "dense", or "none" where mlp_size is 0.
        hidden_act: Activation of MLPs and experts: "silu", with a gate, or "relu2", max(x, 0)^2
            without one.
        num_experts: Experts of a sparse layer.
        num_experts_per_tok: Experts that each token uses.
        moe_intermediate_size: Channels inside an expert.
        shared_expert_intermediate_size: Channels inside an expert that every token uses; 0: none.
        shared_expert_gate: Whether sigmoid of a projection of x multiplies that expert's output.
        scoring_func: Scores from the router's logits: "softmax", or "sigmoid" with a bias that
            affects only the choice of experts.
        norm_topk_prob: Whether the scores of the chosen experts are divided by their sum.
        n_group: Number of equal groups of experts.
        topk_group: Number of these groups from which a token may choose.
        routed_scaling_factor: Factor of the chosen scores.
        embedding_multiplier: Factor of the embedding.
        residual_multiplier: Factor of what each half of a block adds to the stream.
        attention_multiplier: Factor of attention's scores. None: head size^-1/2.
        attention_out_multiplier: Factor of attention's output.
        ssm_multipliers: Factors of Mamba-2's projections: output gate, value, key, query and decay
            (z, x, B, C and dt in its paper).
        ssm_out_multiplier: Factor of Mamba-2's output.
        mamba_inner_norm: Norm of Mamba's query, key and step size: "plain", without weights, or
            "weighted". None: no norm.
        time_step_rank: Inner channels of the projection to Mamba's step size. None:
            hidden_size / 16.
        low_rank_dims: Inner channels of RWKV-7's projections to decay, erase, value and gate. None:
            its authors' numbers.
        mamba_rms_norm: Whether Mamba-2 norms its gated output.
        mlp_multipliers: Factors of an MLP's gate, before the activation, and of its output.
        lm_head_multiplier: Factor of the logits.
        final_logit_softcapping: A bound c of the logits: c tanh(logits / c). None: no bound.
        norm_eps: Added to the mean square, or the variance, in every norm.
        output_norm_eps: The same in the output norms of recurrent layers. None: norm_eps.
        output_norm_bias: Whether that norm of mLSTM layers has a bias.
        norm_type: Norms of the stream: "rms", or "layer", which subtracts the mean and has biases.
        embedding_norm: Whether such a norm follows the embedding.
        zero_centered_norm: Whether the norms of the stream and of attention's q and k store their
            weights minus one.
        post_norm: A mixer whose blocks compute x + norm(f(x)) in place of x + f(norm(x)), in both
            halves. None: no block does.
        deepnorm_alpha: Blocks compute alpha n + f(n) of n = norm(x), in both halves (DeepNorm, with
            each norm at the start of the half that reads it). None: x + f(norm(x)).
        tie_embeddings: Use the embedding as the output head.

    Raises:
        ValueError: A field has the wrong type, range or length, names an unknown layer, or is an
            option that no layer has (but head_k_dim, head_v_dim and conv_size).

    Examples:
        >>> config = ModelConfig(vocab_size=257, hidden_size=64, num_layers=4, num_heads=2,
        ...                      layer_types=("gated_deltanet", "attention"))
        >>> config.layer_types
        ('gated_deltanet', 'attention', 'gated_deltanet', 'attention')
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_types: str | Sequence[str]
    num_heads: int
    num_v_heads: int | None = None
    head_k_dim: int | None = None
    head_v_dim: int | None = None
    num_attention_heads: int | None = None
    num_kv_heads: int | None = None
    attention_head_dim: int | None = None
    attention_qk_norm: Literal["head", "all"] | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    attention_gate: bool = False
    partial_rotary_factor: float = 1.0
    conv_size: int | None = None
    conv_bias: bool | None = None
    n_groups: int = 1
    output_gate: bool | None = None
    output_gate_bias: bool = True
    beta_max: float | None = None
    longest_horizon: float | None = None
    gate_lower_bound: float | None = None
    n_steps: int | None = None
    num_slots: int | None = None
    feature_map: str | None = None
    qk_norm: QueryKeyNorm | None = None
    output_norm: OutputNorm | None = None
    normalizer: bool | None = None
    filter_size: int | None = None
    mini_batch: int | None = None
    spectrum: str | None = None
    window: int | None = None
    num_persistent: int | None = None
    rope_theta: float = 10000.0
    mlp_size: int | None = None
    mlp_layer_types: str | Sequence[str] | None = None
    hidden_act: HiddenActivation = "silu"
    num_experts: int = 0
    num_experts_per_tok: int = 1
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int = 0
    shared_expert_gate: bool = False
    scoring_func: Scores = "softmax"
    norm_topk_prob: bool = True
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    attention_out_multiplier: float = 1.0
    ssm_multipliers: tuple[float, ...] = (1.0,) * 5
    ssm_out_multiplier: float = 1.0
    mamba_rms_norm: bool = True
    mamba_inner_norm: Literal["plain", "weighted"] | None = None
    time_step_rank: int | None = None
    low_rank_dims: tuple[int, ...] | None = None
    mlp_multipliers: tuple[float, ...] = (1.0, 1.0)
    lm_head_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    norm_eps: float = 1e-5
    output_norm_eps: float | None = None
    output_norm_bias: bool = True
    norm_type: Literal["rms", "layer"] = "rms"
    embedding_norm: bool = False
    zero_centered_norm: bool = False
    post_norm: str | None = None
    deepnorm_alpha: float | None = None
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        """Refuse what no model can have, naming the field; then write out the layer pattern."""
        vars(self).update({name: of_python(value) for name, value in vars(self).items()})
        check_fields(self)
        layer_types = expand_layer_types(self.layer_types, self.num_layers)
        object.__setattr__(self, "layer_types", layer_types)
        if self.mlp_layer_types is not None:
            kinds = repeat("mlp_layer_types", self.mlp_layer_types, self.num_layers)
            for kind in kinds:
                check_known("mlp_layer_types", kind, ("dense", "sparse", "none"))
            object.__setattr__(self, "mlp_layer_types", kinds)
        check_used(self)

    def to_json(self) -> str:
        """Return every field as a JSON object, in names that transformers reads, too."""
        return json.dumps(self.to_fields(), indent=2) + "\n"

    def to_fields(self) -> dict[str, Any]:
        """Return what `to_json` writes, as an object."""
        fields = {RENAMED.get(name, name): x for name, x in dataclasses.asdict(self).items()}
        return {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE], **fields}

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
        fields = {name: value for name, value in stored.items() if name not in THEIRS}
        if (model_type := fields.pop("model_type", MODEL_TYPE)) != MODEL_TYPE:
            raise ValueError(f"model_type must be {MODEL_TYPE!r}, got {model_type!r}")
        for ours, theirs in RENAMED.items():
            if theirs in fields and ours in fields:
                raise ValueError(f"keys {ours!r} and {theirs!r} are one option: give one of them")
            if theirs in fields:
                fields[ours] = fields.pop(theirs)
        known = {field.name: field for field in dataclasses.fields(cls)}
        for key in fields:
            if key not in known:
                raise ValueError(f"unknown key {key!r}{nearest(key, known, before=': ')}")
        required = [name for name, field in known.items() if field.default is dataclasses.MISSING]
        if missing := [name for name in required if name not in fields]:
            raise ValueError(f"missing key {', '.join(map(repr, missing))}")
        return cls(**fields)
