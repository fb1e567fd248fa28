"""Checkpoints of transformers' own classes: read, written, and equal to the classes' logits."""

import contextlib
import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForgetGate

from deltarule.lookup import checkpoints
from deltarule.models import CausalLM, CheckpointError
from deltarule.models.convert.copy import convert
from deltarule.models.convert.families import family_of
from deltarule.models.files import CONFIG, WEIGHTS, plain_name
from deltarule.nn import MIXERS, SYSTEMS
from hf.families import MULTIMODAL, make, tiny, tokens
from models.checkpoints import check_round_trip, check_ways_of_reading, close, refuses

# By a title, the family and its options.
CONFIGS = {
    "mamba2": ("mamba2", {}),
    "mamba2, tied, without bias": (
        "mamba2",
        {"tie_word_embeddings": True, "use_conv_bias": False, "n_groups": 1},
    ),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "qwen3_next": ("qwen3_next", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "qwen3_next, dense": ("qwen3_next", {"mlp_only_layers": [0, 1, 2, 3]}),
    "kimi_linear": ("kimi_linear", {"num_local_experts": 8, "n_group": 2, "n_shared_experts": 2}),
    "mamba": ("mamba", {}),
    "mamba, without bias": ("mamba", {"use_conv_bias": False, "time_step_rank": 7, "expand": 3}),
    "falcon_mamba": ("falcon_mamba", {"mixer_rms_eps": 1e-4}),
    "jamba": ("jamba", {"num_experts": 4, "num_experts_per_tok": 2, "mamba_dt_rank": 7}),
    "xlstm": ("xlstm", {}),
    "bamba": ("bamba", {}),
    "falcon_h1": ("falcon_h1", {"attention_in_multiplier": 1.25, "ssm_in_multiplier": 0.8,
                                "mlp_multipliers": [0.7, 1.3]}),
    "falcon_h1, normed": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "head_dim": 24},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {"residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 3.0,
         "embedding_multiplier": 5.0},
    ),
    "granitemoehybrid, dense and turned": (
        "granitemoehybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope", "attention_multiplier": None},
    ),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h, experts": (
        "nemotron_h",
        {"layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
         "n_routed_experts": 4, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
         "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 1.5},
    ),
    "minimax": ("minimax", {}),
    "minimax, with factors": (
        "minimax",
        {f"{branch}_{letter}_factor": factor for branch in ("full_attn", "linear_attn", "mlp")
         for letter, factor in (("alpha", 3.5), ("beta", 0.8))} | {"head_dim": 24},
    ),
    "olmo_hybrid": ("olmo_hybrid", {}),
    "olmo_hybrid, turned": (
        "olmo_hybrid",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
         "linear_allow_neg_eigval": False, "tie_word_embeddings": True},
    ),
}  # fmt: skip

# Models of a family that have no layer of one of its two kinds.
ATTENTION = {"layer_types": ["full_attention"] * 4}
ONE_KIND = {
    "granitemoehybrid": ATTENTION | {"num_local_experts": 0, "mamba_d_state": 24},
    "bamba": {"attn_layer_indices": [0, 1, 2, 3]},
    "jamba": {"attn_layer_period": 1, "attn_layer_offset": 0},
    "qwen3_next": ATTENTION,
    "kimi_linear": ATTENTION,
    "kimi_linear, no attention": {"layer_types": ["linear_attention"] * 4},
    "nemotron_h": {"layer_types": ["full_attention", "mlp"] * 2},
}


def with_whole_filters(tensors, config):
    """Each stream's filters whole: transformers cuts all of them in three equal parts."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    for i in range(3):
        names = [f"model.layers.{i}.linear_attn.{letter}_conv1d.weight" for letter in "qkv"]
        parts = torch.cat([tensors[name] for name in names]).split([keys, keys, values])
        tensors |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    return tensors


def without_decays(tensors, config):
    """Parameters alone: transformers stores the decays beside them, and needs them not."""
    return {name: x for name, x in tensors.items() if not name.endswith(("_decay", "slope_rate"))}


CHANGES = {"olmo_hybrid": with_whole_filters, "minimax": without_decays}


def saved(folder, name, change=lambda tensors, config: tensors, **options):
    """A model of transformers, and the folder that it has saved itself to, with changed tensors."""
    model = tiny(name, **options)
    model.save_pretrained(folder)
    tensors = change(load_file(folder / WEIGHTS), model.config)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return model


@pytest.fixture(params=CONFIGS)
def case(request, tmp_path):
    """A model of transformers, the folder that it has saved itself to, and its model_type."""
    name, options = CONFIGS[request.param]
    changes = {"change": CHANGES[name]} if name in CHANGES else {}
    model = saved(tmp_path / "theirs", name, **changes, **options)
    return model, tmp_path / "theirs", model.config.model_type


def test_logits_are_those_of_the_familys_class_in_every_way_of_reading(case):
    theirs, folder, _ = case
    model, x = CausalLM.load(folder), tokens(2, 70)
    with torch.no_grad():
        close(model(x)[0], theirs(x, use_cache=False).logits)
        check_ways_of_reading(model, x[:, :40])


def test_the_round_trip_is_bit_equal_and_transformers_reads_it(case, tmp_path):
    theirs, folder, model_type = case
    check_round_trip(folder, model_type, tmp_path / "ours", aliases_of(model_type))
    check_transformers_reads(tmp_path / "ours", theirs)


def aliases_of(model_type):
    """Names that this library writes otherwise, as transformers reads them, too."""
    if model_type == "olmo_hybrid":
        layer = "model.layers.3."
        return {f"{layer}feedforward_layer_norm.weight": f"{layer}post_attention_layernorm.weight"}
    if model_type == "kimi_linear":
        names = [f"{name}_proj.weight" for name in ("gate", "up", "down")]
        layer = "model.layers.0."
        return {f"{layer}block_sparse_moe.{name}": f"{layer}mlp.{name}" for name in names}
    return {}


def same_logits(ours, theirs):
    x = tokens(2, 40)
    with torch.no_grad():
        close(ours(x)[0], theirs(x, use_cache=False).logits)


def check_transformers_reads(folder, theirs):
    again, x = AutoModelForCausalLM.from_pretrained(folder).eval(), tokens(2, 40)
    with torch.no_grad():
        expected = theirs(x, use_cache=False).logits
        # Its chunks may have another size.
        close(again(x, use_cache=False).logits, expected)


@pytest.mark.parametrize("name", ONE_KIND)
def test_a_model_without_one_of_the_familys_layers_is_read_and_written(name, tmp_path):
    family = name.partition(",")[0]
    theirs = saved(tmp_path / "theirs", family, **ONE_KIND[name])
    same_logits(CausalLM.load(tmp_path / "theirs"), theirs)
    check_round_trip(tmp_path / "theirs", family, tmp_path / "ours", aliases_of(family))
    check_transformers_reads(tmp_path / "ours", theirs)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("falcon_h1", {}),
        ("granitemoehybrid", {"position_embedding_type": "rope"}),
        ("minimax", {}),
        ("olmo_hybrid", {"linear_value_head_dim": 16}),
    ],
)
def test_a_share_of_turned_channels_that_the_class_does_not_know_is_refused(
    name, options, tmp_path
):
    rope, x = {"rope_type": "default", "rope_theta": 500.0}, tokens(1, 20)
    part = rope | {"partial_rotary_factor": 0.5}
    models = [tiny(name, rope_parameters=one, **options) for one in (rope, part)]
    whole, theirs = (model(x, use_cache=False).logits for model in models)
    assert torch.equal(whole, theirs)
    read, partly = (json.loads(model.config.to_json_string(use_diff=False)) for model in models)
    with pytest.raises(ValueError, match="partial_rotary_factor must be 1 in this family"):
        family_of(partly).config(partly)
    config = dataclasses.replace(family_of(read).config(read), partial_rotary_factor=0.5)
    with pytest.raises(
        ValueError, match="cannot describe this model: partial_rotary_factor must be 1"
    ):
        CausalLM(config).save(tmp_path / "ours", name)


def test_kimi_linear_with_a_lower_bound_of_its_decay(monkeypatch, tmp_path):
    theirs = tiny("kimi_linear")
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    bounded = config | {"linear_attn_config": {"gate_lower_bound": -5.0}}
    (tmp_path / CONFIG).write_text(json.dumps(bounded))
    # transformers has that gate in another family, whose parameters are the same.
    monkeypatch.setattr(KimiLinearForgetGate, "safe_gate_lower_bound", -5.0, raising=False)
    monkeypatch.setattr(KimiLinearForgetGate, "forward", Glm5NextTextForgetGate.forward)
    ours = CausalLM.load(tmp_path)
    same_logits(ours, theirs)
    with pytest.raises(
        ValueError, match=r"cannot describe this model: .*gate_lower_bound -5\.0 would"
    ):
        ours.save(tmp_path / "again", "kimi_linear")


def test_gradients_reach_every_parameter_and_generated_tokens_are_the_likeliest(case):
    model, prompt = CausalLM.load(case[1]), tokens(1, 12)
    model(tokens(1, 20))[0].square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    made = model.generate(prompt.tolist(), max_new_tokens=10, temperature=0)[0]
    whole = torch.cat([prompt, torch.tensor([made])], 1)
    with torch.no_grad():
        assert model(whole)[0][0, 11:-1].argmax(-1).tolist() == made
    # The table of systems names the families that its rows load.
    parts = {part for name in model.config.layer_types for part in name.split("+")}
    rows = {row for row, system in SYSTEMS.items() if case[2] in checkpoints(system)}
    assert parts & {*MIXERS} == rows


def test_a_multimodal_folder_gives_its_language_model(tmp_path):
    text = tiny("qwen3_5")
    whole = make(MULTIMODAL).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="are no parameters of a language model are left out"):
        same_logits(CausalLM.load(tmp_path), text)


def test_decays_that_follow_from_config_json_are_left_out(tmp_path):
    theirs = tiny("minimax")
    theirs.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="12 tensors that are no parameters of a language model"):
        same_logits(CausalLM.load(tmp_path), theirs)


def test_experts_may_be_stored_in_one_tensor(tmp_path):
    together = {n: x for n, x in tiny("qwen3_5_moe").state_dict().items() if ".experts." in n}

    def joined(tensors, config):
        return {n: x for n, x in tensors.items() if "experts." not in n} | together

    theirs = saved(tmp_path, "qwen3_5_moe", joined)
    same_logits(CausalLM.load(tmp_path), theirs)


def test_experts_that_are_missing_or_of_two_dtypes_are_named(tmp_path):
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    saved(tmp_path / "b", "qwen3_5_moe", lambda x, _: {n: y for n, y in x.items() if n != name})
    refuses(tmp_path / "b", f"missing {plain_name(name)!r}")
    saved(tmp_path / "a", "qwen3_5_moe", lambda x, _: x | {name: x[name].half()})
    for read in (CausalLM.load, lambda folder: convert(folder, tmp_path / "c")):
        with pytest.raises(CheckpointError) as caught:
            read(tmp_path / "a")
        assert f"{WEIGHTS}: tensor '{name}' is torch.float16, but others of" in str(caught.value)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_5", {"attention_bias": True}, "attention_bias must be False, got True"),
        ("qwen3_5", {"layer_types": ["sliding"] * 4}, "layer_types must be a list of"),
        ("qwen3_5", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'default'"),
        ("qwen3_5", {"model_type": "qwen3_next", "num_experts": 0}, "does not fit config.json"),
        ("qwen3_next", {"mlp_only_layers": 3}, "mlp_only_layers must be a list, got 3"),
        ("qwen3_next", {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most 4"),
        ("bamba", {"attn_layer_indices": 3}, "attn_layer_indices must be a list, got 3"),
        ("kimi_linear", {"mlp_layer_types": ["dens"] * 4}, "must be one of dense, sparse, none"),
        ("kimi_linear", {"q_lora_rank": 8}, "q_lora_rank must be None, got 8"),
        ("mamba", {"time_step_rank": "x"}, "time_step_rank must be an integer of 1 or more"),
        ("mamba", {"use_bias": True}, "use_bias must be False, got True"),
        ("jamba", {"attn_layer_period": 0}, "attn_layer_period must be an integer of 1 or more"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers must be a list of 5"),
        ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate must be False"),
        ("granitemoehybrid", {"layer_types": ["mamba"]}, "layer_types must name 4 layers, got 1"),
        ("granitemoehybrid", {"logits_scaling": 0}, "logits_scaling must be above 0, got 0"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act must be 'relu2', got 'silu'"),
        ("nemotron_h", {"moe_latent_size": 16}, "moe_latent_size must be None, got 16"),
        ("mamba2", {"time_step_limit": [0.0, 1.0]}, "time_step_limit must be [0.0, inf]"),
        ("minimax", {"mlp_beta_factor": 2.0}, "alpha and beta factors of full_attn, linear_attn"),
        ("minimax", {"num_attention_heads": 6}, "num_attention_heads must be a power of two"),
        ("minimax", {"rotary_dim": 8}, "unknown option 'rotary_dim'"),
        ("mamba2", {"n_groups": 3}, "n_groups must divide the 8 heads"),
    ],
)
def test_what_cannot_be_said_is_named(name, changes, message, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | changes))
    refuses(tmp_path, message, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "options"),
    [("qwen3_5", {}), ("qwen3_5", {"full_attention_interval": 2}), ("minimax", {})],
)
def test_layers_that_are_not_listed_are_those_of_the_familys_class(name, options):
    config = tiny(name).config
    stored = json.loads(config.to_json_string(use_diff=False)) | {"num_hidden_layers": 8} | options
    del stored["layer_types"]
    theirs = type(config)(**stored).layer_types
    found = family_of(stored).config(stored).layer_types
    assert [kind == "attention" for kind in found] == [kind == "full_attention" for kind in theirs]


DAMAGE = (None, 3, -1, 0, "x", [1], {}, math.inf, True)


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in CONFIGS.values()))
def test_a_damaged_option_is_a_value_error_or_harmless(name):
    stored = json.loads(tiny(name).config.to_json_string(use_diff=False))
    family = family_of(stored)
    for option in stored:
        for value in DAMAGE:
            with contextlib.suppress(ValueError):
                family.config(stored | {option: value})


def test_half_a_shard_is_named(tmp_path):
    tiny("qwen3_5").save_pretrained(tmp_path, max_shard_size="200KB")
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    refuses(tmp_path, f"{shard.name}: truncated")
