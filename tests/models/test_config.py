import dataclasses
import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest

from deltarule.models import CausalLM, ModelConfig, count_parameters
from deltarule.models.block import mlp_size
from deltarule.nn import MIXERS

FIELDS = {
    "vocab_size": 257, "hidden_size": 32, "num_layers": 4, "num_heads": 2,
    "layer_types": "gated_deltanet",
}  # fmt: skip
EXPERTS = {
    "mlp_layer_types": "sparse", "num_experts": 4, "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
}  # fmt: skip
LATENT = {"layer_types": "attention", "kv_lora_rank": 8}


@pytest.mark.parametrize(
    ("given", "expanded"),
    [
        ("gated_deltanet", ("gated_deltanet",) * 4),
        (("kda", "attention"), ("kda", "attention") * 2),
        (["kda", "attention"], ("kda", "attention") * 2),
        (("kda", "attention", "gla", "gla"), ("kda", "attention", "gla", "gla")),
    ],
)
def test_one_name_or_a_pattern_stands_for_every_layer(given, expanded):
    assert ModelConfig(**FIELDS | {"layer_types": given}).layer_types == expanded


def test_the_page_has_every_field_and_every_argument_of_generate_in_its_tables():
    page = (Path(__file__).parents[2] / "docs" / "model.md").read_text()
    names = {name for row in re.findall(r"^\|([^|]+)\|", page, re.M) for name in row.split("`")}
    arguments = inspect.signature(CausalLM.generate).parameters
    wanted = {name for name, one in arguments.items() if one.kind is one.KEYWORD_ONLY}
    wanted |= {field.name for field in dataclasses.fields(ModelConfig)}
    assert "draft" in wanted
    assert wanted - names == set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({"layer_types": name, "num_layers": layers}, message)
            for name, layers, message in (
                ("gated_deltanet_h2", 8, "num_layers must be a multiple of 3"),
                ("minimax01", 12, "num_layers must be a multiple of 8"),
                ("deltanet_global_attention", 5, "num_layers must be even and 4 or more"),
                ("deltanet_global_attention", 2, "the second and the (N / 2 + 1)-th, got 2"),
                (("samba", "gla"), 4, "must be 'samba' alone: it is a pattern of layers"),
                ("gated_deltanet_h3", 4, "did you mean 'gated_deltanet_h"),
                ("smaba", 4, "did you mean 'samba'"),
            )
        ),
        (
            {"layer_types": "samba", "num_attention_heads": 4, "num_kv_heads": 3},
            "num_kv_heads must divide num_attention_heads=4, got 3",
        ),
        ({"layer_types": "samba", "num_attention_heads": 0}, "num_attention_heads must be an"),
        ({"layer_types": "gated_delta_net"}, "did you mean 'gated_deltanet'"),
        ({"layer_types": ("kda", "atention")}, "did you mean 'attention'"),
        ({"layer_types": ("kda",) * 3}, "pattern of 3 names, which does not divide num_layers=4"),
        ({"layer_types": ("kda",) * 8}, "pattern of 8 names"),
        ({"layer_types": ("kda,attention",)}, "layer 'kda,attention': give each name apart;"),
        ({"layer_types": ()}, "layer_types must be a name or a tuple"),
        ({"layer_types": (3,)}, "unknown layer 3"),
        ({"num_v_heads": 3}, "num_v_heads must be a multiple of num_heads=2, got 3"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads=2, got 3"),
        ({"vocab_size": True}, "vocab_size must be an integer"),
        ({"vocab_size": 0}, "vocab_size must be an integer of 1 or more, got 0"),
        ({"mlp_size": -1}, "mlp_size must be an integer of 0 or more or None, got -1"),
        ({"attention_qk_norm": "heads"}, "attention_qk_norm must be one of head, all or None"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be a number in [0, 1]"),
        ({"output_norm_eps": 0}, "output_norm_eps must be a finite number above 0, got 0"),
        ({"post_norm": "atention"}, "did you mean 'attention'"),
        ({"post_norm": "attention"}, "post_norm must be one of gated_deltanet or None, got 'att"),
        ({"deepnorm_alpha": 2.0, "post_norm": "attention"}, "post_norm and deepnorm_alpha exclude"),
        ({"n_groups": 2}, "n_groups=2 has no effect on any of layer_types gated_deltanet"),
        ({"layer_types": "kda+atention"}, "unknown layer 'kda+atention': did you mean"),
        ({"layer_types": "kda+kda"}, "layer_types names a part twice in one block: 'kda+kda'"),
        ({"mlp_layer_types": "spars"}, "mlp_layer_types must be one of dense, sparse, none, got"),
        ({"mlp_layer_types": ("dense",) * 3}, "mlp_layer_types is a pattern of 3 names"),
        ({"mlp_layer_types": "dense", "mlp_size": 0}, "mlp_size must be above 0"),
        ({"mlp_layer_types": "sparse"}, "moe_intermediate_size must be given"),
        ({"num_experts": 4}, "or use one of moe, sparse in mlp_layer_types"),
        (EXPERTS | {"n_group": 3}, "n_group must divide num_experts=4, got 3"),
        (EXPERTS | {"topk_group": 2}, "topk_group must be at most n_group=1, got 2"),
        (EXPERTS | {"num_experts_per_tok": 5}, "num_experts_per_tok must be at most 4"),
        (EXPERTS | {"n_group": 4}, "n_group must leave two experts or more in a group, got 4"),
        (EXPERTS | {"shared_expert_gate": True}, "shared_expert_gate=True needs a shared_expert"),
        ({"kv_lora_rank": 8}, "or use one of attention"),
        (
            {"gate_lower_bound": 1.0, "layer_types": "kda"},
            "gate_lower_bound must be None or a finite number < 0, got 1.0",
        ),
        # An option that no layer has would silently do nothing.
        (
            {"layer_types": "gla", "feature_map": "elu"},
            "feature_map='elu' has no effect on any of layer_types gla",
        ),
        ({"layer_types": "deltanet", "longest_horizon": 512.0}, "longest_horizon=512"),
        ({"layer_types": "deltanet", "normalizer": True}, "or use one of linear_attention"),
        (
            {"layer_types": "rwkv7", "n_steps": 3},
            "n_steps=3 has no effect on any of layer_types rwkv7",
        ),
        (
            {"layer_types": ("gla", "attention"), "beta_max": 2.0},
            "layer_types gla, attention: leave it out, or use one of delta",
        ),
        ({"feature_map": "elu1"}, "got 'elu1': did you mean 'elu'?"),
        ({"qk_norm": "l3"}, "qk_norm must be one of none, l1, l2 or None, got 'l3'"),
        ({"output_gate_bias": False}, "output_gate_bias=False has no effect on any"),
        ({"low_rank_dims": (1, 2, 3, 4)}, "or use one of rwkv7"),
        ({"layer_types": "rwkv7", "low_rank_dims": (1, 2)}, "low_rank_dims must be 4 integers"),
        ({"norm_type": "batch"}, "norm_type must be one of rms, layer, got 'batch'"),
        ({"mlp_multipliers": (1.0,)}, "mlp_multipliers must be a tuple of 2 numbers, got (1.0,)"),
        ({"ssm_out_multiplier": 2.0}, "ssm_out_multiplier=2.0 has no effect on any of"),
        ({"attention_multiplier": 0.1}, "or use one of attention, sliding_window"),
        ({"num_kv_heads": 1}, "attention without kv_lora_rank, sliding_window"),
        (LATENT | {"attention_gate": True}, "attention without kv_lora_rank, sliding_window"),
        ({"layer_types": "attention", "v_head_dim": 8}, "use one of attention with kv_lora_rank"),
        ({"layer_types": "attention", "window": 5}, "titans_mal, sliding_window"),
        (
            {"rope_theta": 500.0},
            "rope_theta=500.0 has no effect on any of layer_types gated_deltanet",
        ),
        ({"conv_bias": True, "conv_size": 0}, "conv_bias=True has no effect without a convolution"),
        ({"layer_types": ("gla", "attention"), "conv_bias": True}, "conv_bias=True has no effect"),
        ({"layer_types": "attention", "num_v_heads": 4}, "num_v_heads=4 has no effect on any of"),
        ({"layer_types": "attention", "output_gate": True}, "output_gate=True has no effect on"),
        ({"n_groups": 3, "layer_types": "mamba2"}, "n_groups must divide the 2 heads of Mamba-2"),
        ({"beta_max": 2.5}, "beta_max must be a number in (0, 2], got 2.5"),
    ],
)
def test_bad_fields_are_named(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig(**FIELDS | changes)


def test_numbers_of_numpy_are_kept_as_those_of_python():
    one, share = np.int64(1), np.float32(0.5)
    numbers = {"num_heads": one, "vocab_size": np.uint16(9), "norm_eps": share, "beta_max": share}
    numbers |= {"num_layers": one, "mlp_multipliers": (share, 2.0)}
    config = ModelConfig(**FIELDS | {"layer_types": "deltanet"} | numbers)
    plain = {n: x.item() for n, x in numbers.items() if n != "mlp_multipliers"}
    plain["mlp_multipliers"] = (0.5, 2.0)
    same = ModelConfig(**FIELDS | {"layer_types": "deltanet"} | plain)
    assert config == same
    assert config.to_json() == same.to_json()


def test_json_round_trip():
    multiplied = {"layer_types": "mamba2", "ssm_multipliers": (1.0, 2.0, 1.0, 1.0, 0.5)}
    for options in ({"layer_types": ("kda", "sliding_window"), "window": 7}, EXPERTS | multiplied):
        config = ModelConfig(**FIELDS | options)
        assert ModelConfig.from_json(config.to_json()) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 3
    # Absent keys take their defaults.
    assert ModelConfig.from_json(json.dumps(FIELDS)) == ModelConfig(**FIELDS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, got list"),
        (json.dumps(FIELDS | {"hiden_size": 3}), "unknown key 'hiden_size': did you mean 'hidden"),
        (json.dumps(FIELDS | {"zzz": 3}), "unknown key 'zzz'"),
        ('{"vocab_size": 1, "vocab_size": 2}', "key 'vocab_size' appears more than once"),
        ('{"vocab_size": 257}', "missing key 'hidden_size', 'num_layers'"),
        (json.dumps(FIELDS | {"rope_theta": float("inf")}), "rope_theta must be a finite number"),
        (json.dumps(FIELDS | {"hidden_size": "32"}), "hidden_size must be an integer"),
        (json.dumps(FIELDS | {"layer_types": [["kda"]]}), "unknown layer ('kda',)"),
    ],
    ids=lambda given: given[:40],
)
def test_bad_json_names_the_key(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig.from_json(text)


def test_mlp_size_is_eight_thirds_of_the_stream_in_steps_of_16():
    assert mlp_size(ModelConfig(**FIELDS | {"hidden_size": 96})) == 256
    assert mlp_size(ModelConfig(**FIELDS | {"hidden_size": 32})) == 96
    assert mlp_size(ModelConfig(**FIELDS | {"mlp_size": 0})) == 0


@pytest.mark.parametrize("mixer", MIXERS)
def test_parameters_are_counted_without_building(mixer):
    config = ModelConfig(**FIELDS | {"layer_types": mixer, "tie_embeddings": False})
    assert count_parameters(config) == sum(p.numel() for p in CausalLM(config).parameters())
    tied = dataclasses.replace(config, tie_embeddings=True)
    assert count_parameters(config) - count_parameters(tied) == 257 * 32


def test_parameters_are_counted_of_a_model_that_no_memory_holds():
    config = ModelConfig(**FIELDS | EXPERTS | {"num_experts": 2**30, "num_layers": 1})
    assert count_parameters(config) > 2**39


def test_options_of_one_layer_pass_in_a_mixture():
    options = {"feature_map": "elu", "normalizer": True, "qk_norm": "l1", "num_layers": 2}
    mixture = FIELDS | options | {"layer_types": ("deltanet", "linear_attention")}
    delta, linear = (block.mixer for block in CausalLM(ModelConfig(**mixture)).blocks)
    assert (delta.normalizer, linear.normalizer) == (False, True)
    assert delta.qk_norm == linear.qk_norm == "l1"
    # RetNet has no convolution of its own accord.
    mixture = FIELDS | {"num_layers": 2, "layer_types": ("deltanet", "retnet"), "conv_bias": True}
    delta, retnet = (block.mixer for block in CausalLM(ModelConfig(**mixture)).blocks)
    assert (delta.conv_bias, retnet.conv_bias) == (True, False)
    # At its neutral value an option asks for nothing.
    neutral = {"layer_types": "gla", "n_steps": 1, "beta_max": 1.0, "normalizer": False}
    ModelConfig(**FIELDS | neutral)


@pytest.mark.parametrize("value", [[], {}, [[]], "x", -(10**18), float("nan")])
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ModelConfig)])
def test_a_field_of_any_type_is_taken_or_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        ModelConfig.from_fields(FIELDS | {"layer_types": "attention", name: value})
    assert len(str(caught.value)) < 2000
