"""The sign that is folded into what is written and read is that of the recurrence."""

import pytest
import torch

from deltarule.models import CausalLM, ModelConfig
from deltarule.nn import Mamba2
from experiments.signed_mamba2 import SignedMamba2, with_signs
from tolerance import assert_close

HEADS = 3


def drawn_layer():
    """A layer in float64, whose eigenvalues have both signs."""
    layer = SignedMamba2(
        16, num_heads=1, num_v_heads=HEADS, head_k_dim=4, head_v_dim=5, conv_size=0
    ).double()
    with torch.no_grad():
        layer.dt_bias.zero_()
        layer.A_log.fill_(0.0)
        layer.a_proj.weight.normal_(std=2.0)
    return layer


def recurrence(layer, x, before):
    """The equations from a state, token by token, for q, k and v that the layer projects itself."""
    call = {}
    original = layer.run_operator

    def keep(projections, made):
        call["projections"] = projections
        return original(projections, made)

    layer.run_operator = keep
    y, state = layer(x, before)
    p = call["projections"]
    del layer.run_operator
    dt = torch.nn.functional.softplus(p.decay_logits + p.dt_bias)
    a = 2 * torch.exp(-p.A_log.exp() * dt) - 1
    assert (a < 0).any()
    assert (a > 0).any()
    S = before["recurrent"]
    outputs = []
    for t in range(x.shape[1]):
        write = (dt[:, t, :, None] * p.v[:, t])[..., None] * p.k[:, t, :, None]
        S = a[:, t, :, None, None] * S + write
        outputs.append((S * p.q[:, t, :, None]).sum(-1) + p.D[:, None] * p.v[:, t])
    o = torch.stack(outputs, 1) * torch.nn.functional.silu(p.output_gate)
    return y, layer.o_proj(layer.o_norm(o.flatten(-2))), state["recurrent"], S


def test_layer_is_the_recurrence():
    layer, x = drawn_layer(), torch.randn(2, 93, 16).double()
    _, before = layer(x[:, :23])
    y, y_true, state, state_true = recurrence(layer, x[:, 23:], before)
    assert_close(y, y_true)
    assert_close(state, state_true)


def test_padding_changes_nothing():
    layer, x = drawn_layer(), torch.randn(1, 20, 16).double()
    mask = torch.ones(1, 26, dtype=torch.bool)
    mask[:, 20:] = False
    padded = torch.cat([x, torch.randn(1, 6, 16).double()], 1)
    y, state = layer(padded, mask=mask)
    assert_close(y[:, :20], layer(x)[0])
    assert_close(state["recurrent"], layer(x)[1]["recurrent"])


def test_packed_rows_are_refused():
    with pytest.raises(ValueError, match="cu_seqlens must be None"):
        drawn_layer()(torch.zeros(1, 4, 16).double(), cu_seqlens=torch.tensor([0, 2, 4]))


def test_a_model_takes_the_layers_and_keeps_the_parameters():
    config = ModelConfig(
        vocab_size=5, hidden_size=16, num_layers=2, layer_types="mamba2", num_heads=2, mlp_size=0
    )
    model = CausalLM(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert isinstance(model.blocks[0].mixer, Mamba2)
    signed = with_signs(model)
    assert all(isinstance(block.mixer, SignedMamba2) for block in signed.blocks)
    assert all((before[name] == tensor).all() for name, tensor in signed.state_dict().items())
    assert signed(torch.zeros(1, 4, dtype=torch.int64))[0].isfinite().all()
