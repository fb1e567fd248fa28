"""A block's parts: side by side, alone, and what they are multiplied by."""

import pytest
import torch
import torch.nn.functional as F

from deltarule.models import CausalLM, ModelConfig
from deltarule.nn import Mixer, load_state, save_state
from models.checkpoints import MIXED, check_ways_of_reading, close, redraw

# Heads of an attention whose keys and values are maps of one small vector.
LATENT = {"qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 6}
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 2}


def make(**options):
    torch.manual_seed(0)
    return redraw(CausalLM(ModelConfig(**SIZES | options)))


def test_parts_side_by_side_are_summed_behind_one_norm():
    model = make(
        layer_types="mamba2+attention+mlp", mlp_layer_types="none", ssm_out_multiplier=0.5,
        attention_out_multiplier=2.0, mlp_multipliers=(0.7, 3.0), residual_multiplier=1.5,
    )  # fmt: skip
    block, x = model.blocks[0], torch.randn(2, 9, 32)
    parts, normed = block.mixer, block.mixer_norm(x)
    expected = 0.5 * parts["mamba2"](normed)[0] + 2 * parts["attention"](normed)[0]
    mlp = parts["mlp"]
    gate = F.silu(0.7 * mlp.gate_proj(normed))
    expected = 1.5 * (expected + 3 * mlp.down_proj(gate * mlp.up_proj(normed)))
    stream, y, state = block(x, None, None, None, None, {})
    close(y, expected)
    assert torch.equal(stream, x)
    assert {name.split(".")[0] for name in state} == {"mamba2", "attention"}


@pytest.mark.parametrize(
    "options",
    [
        {"layer_types": "kda+sliding_window", "window": 7},
        {"layer_types": ("mlp", "hgrn2+rwkv7"), "num_layers": 4, "mlp_layer_types": "none"},
        {"layer_types": ("kda", "mlp"), "mlp_layer_types": ("dense", "none")},
        {"layer_types": MIXED, "num_layers": 4, "window": 5},
        {"layer_types": ("kda", "attention"), "kv_lora_rank": 8, **LATENT},
    ],
)
def test_every_way_of_reading(options):
    with torch.no_grad():
        check_ways_of_reading(make(**options), torch.randint(61, (2, 40)))


def test_a_block_without_a_mixer_has_an_empty_state(tmp_path):
    model = make(layer_types=("mlp", "kda"))
    tokens = torch.randint(61, (2, 9))
    state = model(tokens)[1]
    assert [len(layer) for layer in state] == [0, 4]
    assert [len(layer) for layer in model.init_state(3)] == [0, 4]
    save_state(state.select([1, 0]), tmp_path / "state")
    again = model(tokens.flip(0)[:, :1], load_state(tmp_path / "state"))[0]
    close(again.flip(0), model(tokens[:, :1], state)[0])


def test_activation_checkpointing_and_options_of_all_recurrent_layers():
    model = make(layer_types="mamba2+attention")
    tokens = torch.randint(61, (2, 9))
    plain = torch.autograd.grad(model(tokens)[0].square().sum(), list(model.parameters()))
    model.activation_checkpointing, model.save_states = True, False
    assert not any(
        part.save_states
        for part in model.modules()
        if isinstance(part, Mixer) and part.rule.name == "mamba2"
    )
    again = torch.autograd.grad(model(tokens)[0].square().sum(), list(model.parameters()))
    for one, other in zip(plain, again, strict=True):
        close(other, one)


@pytest.mark.parametrize("options", [{"residual_multiplier": 0.5}, {"mlp_multipliers": (0.5, 1.0)}])
def test_multiplied_blocks_leave_the_few_kernels_of_one_token(options, monkeypatch):
    def asked(*arguments):
        raise AssertionError("asked")

    monkeypatch.setattr("deltarule.models.block.one_token.fits", asked)
    token = torch.zeros(1, 1, dtype=torch.int64)
    make(layer_types="kda", **options)(token)
    with pytest.raises(AssertionError, match="asked"):
        make(layer_types="kda")(token)


def test_logits_are_multiplied_and_bounded():
    options = {"lm_head_multiplier": 2.0, "final_logit_softcapping": 0.5}
    tokens = torch.randint(61, (2, 9))
    logits = make(layer_types="kda")(tokens)[0]
    close(make(layer_types="kda", **options)(tokens)[0], 0.5 * torch.tanh(2 * logits / 0.5))
