"""Checkpoints of flash-linear-attention: read, written, and equal to its own formulas."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltarule.models import CausalLM, ModelConfig
from deltarule.models.convert.families import family_of
from deltarule.models.files import CONFIG, WEIGHTS
from models import fla_oracle
from models.checkpoints import check_round_trip, drawn, refuses
from tolerance import relative_rms

COMMON = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
    "norm_eps": 1e-6, "tie_word_embeddings": False, "num_heads": 2, "hidden_act": "swish",
}  # fmt: skip
TAPS = {"use_short_conv": True, "conv_size": 4}
CONVOLVED = TAPS | {"allow_neg_eigval": False}
SHARES = {"expand_k": 1.0, "expand_v": 1.0}
SIZED = {"head_dim": 8, "expand_v": 2.0}
FULL = {
    "layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": False, "window_size": None,
    "rope_theta": 5000.0,
}  # fmt: skip
SLIDING = FULL | {"layers": [0], "num_kv_heads": 4, "window_size": 8}
CONFIGS = {
    "delta_net": CONVOLVED | SHARES
    | {"qk_activation": "silu", "qk_norm": "l2", "use_gate": False},
    "delta_net, ablation": CONVOLVED | SHARES
    | {"qk_activation": "elu", "qk_norm": "sum", "use_gate": True, "allow_neg_eigval": True},
    "gated_deltanet": CONVOLVED | SIZED | {"use_gate": True, "num_v_heads": 4},
    "gated_deltanet, plain": SIZED
    | {"use_gate": False, "use_short_conv": False, "allow_neg_eigval": True},
    "kda": CONVOLVED | {"head_dim": 16, "expand_v": 1.0},
    "kda, bounded": CONVOLVED
    | {"head_dim": 16, "expand_v": 1.0, "safe_gate": True, "lower_bound": -5.0},
    "kda, bounded far": CONVOLVED | {"head_dim": 16, "expand_v": 1.0, "lower_bound": -20.0},
    "gated_deltaproduct": CONVOLVED | SIZED
    | {"num_householder": 3, "use_forget_gate": True, "use_output_gate": True,
       "allow_neg_eigval": True},
    "gated_deltaproduct, ungated": CONVOLVED | SIZED
    | {"num_householder": 2, "use_forget_gate": False, "use_output_gate": False},
    "gla": SHARES | {"expand_k": 0.5, "use_output_gate": True, "use_short_conv": False},
    "gla, convolved": TAPS | SHARES
    | {"expand_k": 0.5, "use_output_gate": False, "tie_word_embeddings": True},
    "retnet": SHARES | {"expand_v": 2.0, "use_output_gate": True, "use_short_conv": False},
    "retnet, ungated": SHARES | {"expand_v": 2.0, "use_output_gate": False},
    "hgrn2": TAPS | {"expand_ratio": 16, "use_short_conv": False, "use_lower_bound": True},
    "hgrn2, convolved": TAPS | {"expand_ratio": 16, "use_lower_bound": True},
    "gated_deltanet, hybrid": CONVOLVED | SIZED
    | {"use_gate": True, "num_v_heads": 4, "attn": FULL},
    "gated_deltaproduct, hybrid": CONVOLVED | SIZED
    | {"num_householder": 2, "use_forget_gate": True, "use_output_gate": True, "attn": SLIDING},
    "kda, hybrid": CONVOLVED | {"head_dim": 16, "expand_v": 1.0, "attn": SLIDING},
    "gla, hybrid": SHARES | {"expand_k": 0.5, "use_output_gate": True, "attn": FULL},
    "linear_attn": SHARES | {"feature_map": "elu"},
    "linear_attn, identity": SHARES | {"feature_map": "identity"},
    "rwkv7": fla_oracle.FIELDS,
}  # fmt: skip


def make(folder, title, dtype=torch.float32, **changes):
    """A checkpoint of random weights; returns its config.json and its tensors."""
    torch.manual_seed(0)
    config = {"model_type": title.split(",")[0]} | COMMON | CONFIGS[title] | changes
    CausalLM(family_of(config).config(config)).save(folder, config["model_type"])
    stored = load_file(folder / WEIGHTS)
    tensors = {name: drawn(name, x.shape).to(dtype) for name, x in stored.items()}
    for name, x in tensors.items():
        # Of a size that keeps a mixture with the token before in its range.
        if title == "rwkv7" and (name.endswith(("bias", "x_k")) or ".x_" in name):
            tensors[name] = 0.5 * torch.randn_like(x)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    return config, tensors


@pytest.mark.parametrize("title", CONFIGS)
def test_logits_are_those_of_the_familys_formulas_and_the_round_trip_is_bit_equal(
    title, tmp_path, random_tokens
):
    config, tensors = make(tmp_path / "a", title)
    tokens = random_tokens(2, 40, vocab_size=config["vocab_size"])
    model = CausalLM.load(tmp_path / "a").double()
    with torch.no_grad():
        expected = fla_oracle.logits(config, tensors, tokens)
        # A sum by which keys are divided has an eps here.
        bar = 1e-7 if config.get("qk_norm") == "sum" else 1e-10
        assert relative_rms(model(tokens)[0], expected) < bar
    check_round_trip(tmp_path / "a", config["model_type"], tmp_path / "b")


def test_bfloat16_keeps_its_bits(tmp_path):
    make(tmp_path / "a", "kda", torch.bfloat16)
    check_round_trip(tmp_path / "a", "kda", tmp_path / "b")


def test_the_width_of_the_mlp_follows_its_ratio(tmp_path):
    config, _ = make(tmp_path / "a", "gla", intermediate_size=256)
    del config["intermediate_size"]
    (tmp_path / "a" / CONFIG).write_text(json.dumps(config | {"hidden_ratio": 4}))
    assert CausalLM.load(tmp_path / "a").config.mlp_size == 256


@pytest.mark.parametrize(
    ("title", "changes", "message"),
    [
        ("kda", {"lower_bound": 5.0}, "lower_bound must be None or a finite number < 0, got 5.0"),
        ("kda", {"safe_gate": True}, "lower_bound must be given with safe_gate, got None"),
        ("hgrn2", {"expand_ratio": 24}, "expand_ratio must divide hidden_size=32, got 24"),
        ("hgrn2", {"expand_ratio": 8}, "num_heads must be 4 with expand_ratio, got 2"),
        ("kda", {"hiden_size": 3}, "unknown option 'hiden_size'"),
        # What Mamba-2 keeps in it changes the model.
        ("kda", {"ssm_cfg": {}}, "unknown option 'ssm_cfg'"),
        ("kda", {"hidden_act": "gelu"}, "got 'gelu': CausalLM has no option for it"),
        ("kda", {"num_heads": "two"}, "num_heads must be an integer"),
        ("kda", {"hidden_size": None}, "missing key 'hidden_size'"),
        ("kda", {"attn": {"layers": [0]}}, "missing key 'num_heads'"),
        ("kda", {"attn": FULL | {"layers": [2]}}, "layers must number some of 2 from 0, got [2]"),
        ("kda", {"attn": FULL | {"qkv_bias": True}}, "qkv_bias must be False, got True"),
        ("kda", {"attn": [FULL]}, "attn must be an object"),
        ("kda", {"attn": FULL | {"qk_norm": True}}, "unknown option 'qk_norm'"),
        ("hgrn2", {"attn": FULL}, "attn must be None"),
        ("kda", {"model_type": "kda_"}, "did you mean 'kda'?"),
        ("kda", {"model_type": "llama"}, "mamba, falcon_mamba, jamba, got 'llama'"),
        ("kda", {"model_type": 3}, "model_type must be one of deltarule, delta_net"),
        ("kda", {"num_hidden_layers": 500}, "asks for num_layers=500, but only"),
        ("kda", {"num_hidden_layers": 3}, "missing 'layers.2.attn.A_log'"),
        ("kda", {"num_hidden_layers": 1}, "unexpected 'layers.1.attn.A_log'"),
        (
            "kda",
            {"model_type": "gated_deltanet"},
            "does not fit config.json with model_type 'gated_deltanet': missing",
        ),
        ("kda", {"vocab_size": 127}, f"{WEIGHTS}: tensor 'model.embeddings.weight' has"),
        ("kda", {"tie_word_embeddings": True}, f"unexpected 'lm_head.weight' in {WEIGHTS}"),
        ("delta_net", {"expand_k": 0.4}, "expand_k must give 2 heads equal channels"),
        ("delta_net", {"expand_v": math.inf}, "expand_v must be a finite number, got inf"),
        ("delta_net", {"qk_norm": "l3"}, "qk_norm must be one of l2, sum, got 'l3'"),
        ("delta_net", {"qk_norm": ["l2"]}, "qk_norm must be one of l2, sum, got ['l2']"),
        ("hgrn2", {"num_heads": 0}, "num_heads must be an integer of 1 or more, got 0"),
        ("linear_attn", {"feature_map": None}, "feature_map must be one of identity, elu, relu"),
        ("rwkv7", {"norm_eps": 1e-6}, "norm_eps must be 0.00064 / head_dim=64, got 1e-06"),
        ("rwkv7", {"num_heads": 3}, "num_heads must be hidden_size / head_dim=2, got 3"),
        ("rwkv7", {"value_dim": [128, 64, 128]}, "value_dim must be one number for all layers"),
        ("rwkv7", {"attn": {"layers": [0]}}, "attn must be None"),
        ("rwkv7", {"v_low_rank_dim": 9}, "asks for [9, 128]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_in_one_line(title, changes, message, tmp_path):
    config, _ = make(tmp_path / "a", title)
    (tmp_path / "a" / CONFIG).write_text(json.dumps(config | changes))
    refuses(tmp_path / "a", message, str(tmp_path / "a"))


SMALL = {"vocab_size": 9, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "mlp_size": 16}


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("kdaa", {"layer_types": "kda"}, "did you mean 'kda'?"),
        ("kda", {"layer_types": ("attention", "sliding_window")}, "layer_types ("),
        ("retnet", {"layer_types": ("retnet", "attention")}, "layer_types ("),
        ("kda", {"layer_types": "gated_deltanet"}, "layer_types ("),
        ("kda", {"layer_types": "kda", "beta_max": 1.5}, "beta_max 1.5 would be read as 1.0"),
        ("kda", {"layer_types": "kda", "mlp_size": 0}, "intermediate_size must be an integer of 1"),
        (
            "kda",
            {"layer_types": "kda", "output_gate": False},
            "output_gate False would be read as True",
        ),
        ("retnet", {"layer_types": "retnet", "conv_size": 4}, "conv_size 4 would be read as 0"),
        ("linear_attn", {"layer_types": "linear_attention", "feature_map": "dpfp"}, "feature_map"),
    ],
)
def test_a_family_that_cannot_say_the_model_writes_nothing(family, options, message, tmp_path):
    model = CausalLM(ModelConfig(**(SMALL | options)))
    with pytest.raises(ValueError) as caught:
        model.save(tmp_path / "a", family)
    assert message in str(caught.value)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("family", "layer_types"),
    [
        ("delta_net", "deltanet"), ("gated_deltanet", "gated_deltanet"), ("kda", "kda"),
        ("gated_deltaproduct", "gated_delta_product"), ("gated_deltaproduct", "delta_product"),
        ("gla", "gla"), ("retnet", "retnet"), ("linear_attn", "linear_attention"),
    ],
)  # fmt: skip
def test_a_model_of_defaults_goes_out_and_comes_back(family, layer_types, tmp_path, random_tokens):
    torch.manual_seed(0)
    model = CausalLM(ModelConfig(layer_types=layer_types, **SMALL))
    model.save(tmp_path / "a", family)
    again = CausalLM.load(tmp_path / "a")
    tokens = random_tokens(1, 20, vocab_size=9)
    assert torch.equal(again(tokens)[0], model(tokens)[0])
