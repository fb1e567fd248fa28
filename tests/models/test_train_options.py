"""Every option that models of other projects need, trained for 200 steps on one short text."""

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
        "mlp_layer_types": "sparse", **EXPERTS, "scoring_func": "sigmoid", "n_group": 2,
        "routed_scaling_factor": 2.0, "shared_expert_intermediate_size": 16,
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
    "no positions, scaled scores, capped logits": {
        "layer_types": ("mamba2", "attention"), **MAMBA2, "partial_rotary_factor": 0.0,
        "attention_multiplier": 0.2, "residual_multiplier": 0.5, "final_logit_softcapping": 30.0,
    },
}  # fmt: skip


def losses(**options):
    torch.manual_seed(0)
    fields = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 2}
    model = CausalLM(ModelConfig(**{"layer_types": "kda", **fields, **options}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(61, (2, 25))
    for _ in range(STEPS):
        loss = next_token_loss(model(tokens[:, :-1])[0], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


@pytest.mark.parametrize("name", OPTIONS)
def test_200_steps_learn_a_text_by_heart(name):
    found = list(losses(**OPTIONS[name]))
    assert len(found) == STEPS
    assert math.isfinite(found[-1])
    assert found[0] > 3
    assert found[-1] < 0.1
