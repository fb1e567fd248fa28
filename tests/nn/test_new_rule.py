"""A linear rule of one's own is one file and one line in `MIXERS`."""

import inspect

import pytest
import torch
import torch.nn.functional as F

from deltarule.models import CausalLM, ModelConfig
from deltarule.nn import KDA, LRU, MIXERS, RWKV7, DeltaMixer, Mamba1, Mesa, Rule, parameter_roles
from models.checkpoints import check_ways_of_reading

# ---- what would be nn/coupled.py ----------------------------------------------------------------


def arguments(projections):
    """DeltaNet that forgets as much as it writes: a = 1 - beta."""
    logits = projections.need("beta_logits").float()
    gates = {"beta": torch.sigmoid(logits), "log_decay": F.logsigmoid(-logits)}
    return projections.qkv | gates | {"normalize_qk": True}


class Coupled(DeltaMixer):
    """Coupled gates: S = (1 - beta) S (I - beta k k^T) + beta v k^T."""

    rule = Rule(
        name="coupled",
        title="Coupled gates",
        recurrence="S = (1 - beta) S (I - beta k k^T) + beta v k^T",
        decay="head",
        erase="tied",
        source="this test",
        arguments=arguments,
    )
    default_conv_size = 4
    default_output_gate = True


# -------------------------------------------------------------------------------------------------


@pytest.fixture
def model(monkeypatch):
    # The one line.
    monkeypatch.setitem(MIXERS, "coupled", Coupled)
    sizes = {"vocab_size": 17, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_v_heads": 4}
    return CausalLM(ModelConfig(**sizes, layer_types=("coupled", "attention")))


def test_by_its_recurrence():
    layer = Coupled(16, num_heads=1, conv_size=0, output_gate=False).double()
    x, state, rows = torch.randn(1, 7, 16, dtype=torch.float64), torch.zeros(16, 16).double(), []
    q, k, v = (getattr(layer, f"{name}_proj")(x[0]) for name in "qkv")
    beta = torch.sigmoid(layer.b_proj(x[0]).float()).double()
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    for t in range(7):
        state = (1 - beta[t]) * state
        state = state + beta[t] * torch.outer(v[t] - state @ k[t], k[t])
        rows.append(state @ q[t] / 4)
    expected = layer.o_proj(F.rms_norm(torch.stack(rows), (16,), layer.o_norm.weight, 1e-5))
    torch.testing.assert_close(layer(x)[0][0], expected, rtol=1e-5, atol=1e-6)


def test_in_a_model_step_by_step_padded_and_packed(model):
    with torch.no_grad():
        check_ways_of_reading(model, torch.randint(17, (2, 40)))


def test_it_has_gradients_and_decays_what_it_should(model):
    model(torch.randint(17, (4, 12)))[0].square().sum().backward()
    assert all((p.grad != 0).any() for p in model.parameters())
    assert parameter_roles(model)["blocks.0.mixer.b_proj.weight"] == "gate"


def test_help_shows_the_options_that_a_layer_takes():
    assert set(inspect.signature(Mamba1).parameters) == {
        *("hidden_size", "num_heads", "head_k_dim", "head_v_dim", "conv_size", "conv_bias"),
        *("output_gate", "layer_index", "num_layers"),
    }
    assert "beta_max: Largest write strength" in KDA.__doc__
    assert "feature_map:" in KDA.__doc__
    assert "normalizer:" not in KDA.__doc__
    assert "num_v_heads" not in Mesa.__doc__
    assert "Defaults: head_k_dim = hidden_size / heads, head_v_dim = head_k_dim, a" in KDA.__doc__
    assert "an output gate (sigmoid), beta_max = 1" in KDA.__doc__
    assert "an output gate.\n" in RWKV7.__doc__
    # Whatever head_k_dim is.
    assert "head_v_dim = hidden_size / heads" in LRU.__doc__
    assert LRU(32, num_heads=2, head_k_dim=5).head_v_dim == 16
    assert inspect.signature(KDA).parameters["beta_max"].annotation == (float | None)
    assert "beta_max" in inspect.signature(Coupled).parameters
