"""What weight decay may shrink: every parameter says its role, and the optimizer asks it."""

import copy

import pytest
import torch
from torch import nn

from deltarule.nn import parameter_roles
from deltarule.train.optimizer import decays
from nn.layers import NAMES, make

# Beside q, k, v and output projections with their filters, and the output gate where there is one:
# what papers and authors' programs decay. Everything else of a layer keeps its size.
QKVO = {"q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "q_conv", "k_conv", "v_conv"}
DECAYED = {
    # The maps of q and k are matrices like their projections.
    "linear_attention": QKVO | {"qk_map.q_weight", "qk_map.k_weight"},
    # What a key channel forgets is its key: the projection is of a gate.
    "hgrn2": QKVO - {"k_proj"},
    # RWKV's authors decay large projections only; in RWKV-7 the gate is one of the small maps.
    "rwkv7": QKVO - {"g_proj"},
    # z and the output gate; i and f are gates of the memory, and so is what they see of it.
    "slstm": QKVO | {"r_proj", "x_conv"},
}
OPTIONS = {"linear_attention": {"feature_map": "hedgehog"}}


@pytest.mark.parametrize("name", NAMES)
def test_only_projections_and_their_filters_decay(name):
    layer = make(name, **OPTIONS.get(name, {}))
    expected = DECAYED.get(name, QKVO)
    for key, decay in decays(layer).items():
        # Of Titans' blocks: what their memory has is named as it is there.
        owner = key.removeprefix("memory.")
        owner = owner if owner.startswith("qk_map") else owner.split(".")[0]
        matrix = owner in expected and not key.endswith("bias")
        assert decay == matrix, key
    assert decays(layer)["o_proj.weight"]


NAMED = {
    "gated_rfa": {"qk_map.bandwidth": "scale", "a_proj.weight": "gate"},
    "gated_deltanet2": {"erase_proj.weight": "gate", "write_proj.weight": "gate"},
    "rwkv7": {"erase_proj.1.weight": "gate", "value_proj.0.weight": "gate", "shift_mix": "gate"},
    "rwkv6": {"mix_up": "gate", "mix_down.weight": "gate", "first_mix": "gate"},
    "ttt_mlp": {"inner_norm_weight": "scale", "inner_norm_bias": "scale", "starts.1": "start"},
    "titans_linear": {"m_proj.weight": "gate", "starts.0": "start", "decay_bias": "gate"},
    "abc": {"s_proj.weight": "gate"},
    "gsa": {"s_proj.weight": "gate"},
    "mamba1": {"a_proj.0.weight": "gate", "A_log": "gate", "D": "gate"},
    "s4": {"B": "gate", "C": "gate"},
    "kda": {"g_proj.0.weight": "matrix", "A_log": "gate", "o_norm.weight": "vector"},
}


@pytest.mark.parametrize("name", NAMED)
def test_roles_by_name(name):
    roles = parameter_roles(make(name))
    assert {key: roles[key] for key in NAMED[name]} == NAMED[name]


class LowRankAdapter(nn.Module):
    """A wrapped projection, as libraries of adapters make them: it has no `weight`."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)

    def forward(self, x):
        return self.base(x) + self.down(x).sum(-1, keepdim=True)


def emptied(layer):
    return layer.to("meta").to_empty(device="cpu")


def loaded(layer):
    layer.load_state_dict(layer.state_dict(), assign=True)
    return layer


@pytest.mark.parametrize("change", [copy.deepcopy, emptied, loaded])
def test_roles_survive_copies_and_wrappers(change):
    layer = change(make("gated_deltanet2"))
    layer.erase_proj = LowRankAdapter(layer.erase_proj)
    roles = parameter_roles(nn.Sequential(layer))
    assert roles["0.erase_proj.base.weight"] == roles["0.erase_proj.down.weight"] == "gate"
    assert roles["0.q_proj.weight"] == "matrix"


@pytest.mark.parametrize("name", NAMES)
def test_a_wrapped_projection_is_never_asked_for_its_weight(name):
    layer, x = make(name), torch.randn(2, 5, 32)
    for key, child in list(layer.named_children()):
        if type(child) is nn.Linear:
            setattr(layer, key, LowRankAdapter(child))
    y, state = layer(x)
    again, _ = layer(x[:, :1], state)
    y.sum().backward()
    assert y.shape == x.shape
    assert again.isfinite().all()
    assert layer.init_state(3).keys() == layer.init_state(0).keys()
