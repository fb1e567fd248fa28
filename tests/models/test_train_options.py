"""Every option of a model, trained for 200 steps on one short text."""

import dataclasses
import math

import pytest
import torch

from deltarule.models import CausalLM, ModelConfig, next_token_loss

STEPS = 200
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA2 = {"num_heads": 4, "head_k_dim": 8, "head_v_dim": 16, "n_groups": 2, "conv_bias": True}
OPTIONS = {
    "DeepNorm, one norm of all heads": {
        "layer_types": ("lightning", "attention"), "deepnorm_alpha": 2.0, "output_norm": "all",
    },
    "gated attention of its own heads, part of them turned, norms less one": {
        "layer_types": ("gated_deltanet", "attention"), "num_v_heads": 4, "num_attention_heads": 4,
        "num_kv_heads": 2, "attention_head_dim": 12, "attention_qk_norm": "head",
        "attention_gate": True, "partial_rotary_factor": 0.5, "zero_centered_norm": True,
    },
    "norms after attention, one norm of all its heads": {
        "layer_types": ("gated_deltanet", "attention"), "post_norm": "attention",
        "attention_qk_norm": "all", "beta_max": 2.0, "output_norm_eps": 1e-3,
    },
    "experts": {
        "mlp_layer_types": ("dense", "sparse"), **EXPERTS, "shared_expert_intermediate_size": 16,
        "shared_expert_gate": True, "norm_topk_prob": False,
    },
    "experts in groups": {
        "mlp_layer_types": "sparse", **EXPERTS, "num_experts": 6, "scoring_func": "sigmoid",
        "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.0,
        "shared_expert_intermediate_size": 16,
    },
    "experts without gate, one part a block": {
        "layer_types": ("kda", "moe", "attention", "mlp"), "num_layers": 4, "hidden_act": "relu2",
        "mlp_layer_types": "none", **EXPERTS,
    },
    "side by side, with multipliers": {
        "layer_types": "mamba2+attention", **MAMBA2, "mamba_rms_norm": False,
        "ssm_multipliers": (0.5, 0.7, 1.1, 0.9, 0.8), "ssm_out_multiplier": 0.7,
        "attention_out_multiplier": 0.9, "mlp_multipliers": (0.8, 1.2),
        "embedding_multiplier": 1.5, "lm_head_multiplier": 0.8,
    },
    "latent attention, gate without bias": {
        "layer_types": ("kda", "attention"), "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "output_gate_bias": False,
    },
    "decay with a lower bound": {"layer_types": "kda", "gate_lower_bound": -5.0},
    "norms inside Mamba": {
        "layer_types": "mamba1", "mamba_inner_norm": "weighted", "time_step_rank": 5,
    },
    "norm without bias": {"layer_types": "xlstm_7b", "output_norm_bias": False},
    "blocks of RWKV-7": {
        "layer_types": ("rwkv7", "channel_mix"), "mlp_layer_types": "none", "norm_type": "layer",
        "embedding_norm": True, "low_rank_dims": (8, 6, 4, 12),
    },
    "mixer and MLP side by side": {"layer_types": "kda+mlp", "mlp_layer_types": "none"},
    "several writes a token, fewer taps, no gate": {
        "layer_types": ("gated_delta_product", "gated_deltanet"), "n_steps": 3, "conv_size": 2,
        "output_gate": False, "longest_horizon": 100.0, "norm_eps": 1e-3, "mlp_size": 48,
    },
    "feature maps, a normaliser, a head of its own": {
        "layer_types": ("linear_attention", "deltanet"), "feature_map": "elu", "qk_norm": "l1",
        "normalizer": True, "tie_embeddings": False,
    },
    "slots, a window, other wavelengths": {
        "layer_types": ("gsa", "sliding_window"), "num_slots": 8, "window": 6, "rope_theta": 100.0,
    },
    "filters and a spectrum": {
        "layer_types": ("hyena", "s4d"), "filter_size": 12, "spectrum": "inv",
    },
    "memories in mini-batches, beside persistent tokens": {
        "layer_types": "titans_mag", "mini_batch": 8, "num_persistent": 2, "window": 6,
    },
    "no positions, scaled scores, capped logits": {
        "layer_types": ("mamba2", "attention"), **MAMBA2, "partial_rotary_factor": 0.0,
        "attention_multiplier": 0.2, "residual_multiplier": 0.5, "final_logit_softcapping": 30.0,
    },
}  # fmt: skip


# What every model here has; sizes alone have no default.
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 2}


def losses(**options):
    torch.manual_seed(0)
    model = CausalLM(ModelConfig(**{"layer_types": "kda", **SIZES, **options}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(61, (2, 25))
    for _ in range(STEPS):
        loss = next_token_loss(model(tokens[:, :-1])[0], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def test_every_option_is_among_them():
    """At another value than its default, with which it does nothing."""
    trained = {
        field.name
        for field in dataclasses.fields(ModelConfig)
        if any(given.get(field.name, field.default) != field.default for given in OPTIONS.values())
    }
    assert {field.name for field in dataclasses.fields(ModelConfig)} - trained - {*SIZES} == set()


@pytest.mark.parametrize("name", OPTIONS)
def test_200_steps_learn_a_text_by_heart(name):
    found = list(losses(**OPTIONS[name]))
    assert len(found) == STEPS
    assert math.isfinite(found[-1])
    assert found[0] > 3
    assert found[-1] < 0.1
