"""Options that a layer cannot have are refused by name, with what would do."""

import numpy as np
import pytest
import torch

from deltarule.nn import MIXERS, Attention, LatentAttention
from nn.layers import HIDDEN, LINEAR, NAMES

# Their widths are 2 hidden_size in all, which two heads can always share.
WIDTH_OF_ITS_OWN = (
    *("mamba2", "mamba1", "signed_mamba1", "s4", "s4d", "longhorn_released", "hgrn"),
)
# What a layer of the frame refuses of its options, and every layer of its sizes.
FRAME = {
    "num_v_heads must be a multiple of num_heads=2, got 3": {"num_v_heads": 3},
    "head_k_dim must be an integer": {"head_k_dim": 0},
    "head_v_dim must be an integer": {"head_v_dim": -1},
    "conv_size must be": {"conv_size": -1},
    "n_steps must be": {"n_steps": 0},
    "beta_max must be": {"beta_max": 2.5},
    "beta_max must be .*": {"beta_max": "2"},
    "norm_eps must be a finite number above 0, got -1": {"norm_eps": -1},
    "norm_eps must be a finite number above 0, got '1'": {"norm_eps": "1"},
    "layer_index must be an integer from 0 to num_layers - 1 = 1, got 2":
        {"layer_index": 2, "num_layers": 2},
    "layer_index must be an integer from 0 to num_layers - 1 = 1, got 0.5":
        {"layer_index": 0.5, "num_layers": 2},
}  # fmt: skip
SIZES = {
    "hidden_size must be an integer": {"hidden_size": 0},
    r"hidden_size must be a multiple of num_heads=2, got (33|24.75|16.5)": {"hidden_size": 33},
    "num_heads must be an integer of 1 or more, got 0": {"num_heads": 0},
    "num_heads must be an integer of 1 or more, got 2.0": {"num_heads": 2.0},
}
SCANS = ("mamba1", "s4", "longhorn_released", "dfw", "abc", "gsa")
VECTORS = ("hgrn", "rg_lru", "rwkv4")
MEMORIES = ("ttt_linear", "ttt_mlp", "titans_linear", "titans_mlp")
BLOCKS = ("titans_mac", "titans_mag", "titans_mal")
# What horizons cannot be spread to.
SHORT = "longest_horizon must be None or a number above 8"
NO_HORIZONS = (8, 0, -1.0, float("inf"), float("nan"), "512", True)
# By what is said: layers, and options of theirs.
OWN = {
    "n_steps must be None or 1 for rwkv7, got 2: it writes once a token": ("rwkv7", {"n_steps": 2}),
    "n_steps must be None or 1 for comba, got 3: it writes once a token": ("comba", {"n_steps": 3}),
    "n_steps must be None or 1 for deltanet, got 2: it writes": ("deltanet", {"n_steps": 2}),
    "beta_max must be None for gla, got 2.0: it has no write strength": ("gla", {"beta_max": 2.0}),
    "beta_max must be None for rwkv7, got 2.0: it has no write": ("rwkv7", {"beta_max": 2.0}),
    "num_v_heads must be None or 2 for mesa, got 4: its value heads": ("mesa", {"num_v_heads": 4}),
    "num_v_heads must be None or 2": (
        ("hgrn2", "multi_kv_deltanet", "rwkv6", "rwkv7"), {"num_v_heads": 4},
    ),
    "num_slots must be None for kda, got 4: abc, gsa": ("kda", {"num_slots": 4}),
    "num_slots must be an integer of 1 or more, got 0": ("abc", {"num_slots": 0}),
    "rope_theta must be None for gsa, got 10.0: it does not rotate": ("gsa", {"rope_theta": 10.0}),
    "conv_size must be None or 0": (("rwkv6", "rwkv7"), {"conv_size": 4}),
    "gate_lower_bound must be None or a finite number < 0": ("kda", {"gate_lower_bound": 0.0}),
    "longest_horizon must be None with": (
        "kda", {"gate_lower_bound": -5.0, "longest_horizon": 64.0},
    ),
    "longest_horizon": ("deltanet", {"longest_horizon": 512.0}),
    "head_k_dim must be even for rotary positions, got 3": ("retnet", {"head_k_dim": 3}),
    "head_k_dim must be even": (MEMORIES[:2], {"head_k_dim": 7}),
    "head_k_dim must be None or 1 for": (VECTORS, {"head_k_dim": 8}),
    "head_v_dim must be None or 8 for ttt_linear, got 4": (
        "ttt_linear", {"head_k_dim": 8, "head_v_dim": 4},
    ),
    "head_v_dim must be None .*its keys and values have one size": ("hyena", {"head_v_dim": 4}),
    "filter_size must be an integer of 1 or more, got 0": ("hyena", {"filter_size": 0}),
    "spectrum must be one of legs, inv, lin, got 'leg': did": ("s4d", {"spectrum": "leg"}),
    "mini_batch must be an integer of 1 or more, got 0": (MEMORIES, {"mini_batch": 0}),
    "mini_batch must be None for mesa, got 4: ttt and titans": ("mesa", {"mini_batch": 4}),
    "num_persistent must be an integer of 0 or more, got -1": (BLOCKS, {"num_persistent": -1}),
    "window must be an integer of 1 or more, got 0": ((*BLOCKS, "attention"), {"window": 0}),
    "rope_theta must be a finite number above 0, got -1": ("attention", {"rope_theta": -1}),
    "head_dim must be even for rotary positions, got 3": ("attention", {"head_dim": 3}),
    "output_gate must be True, False or None, got 'no'": (
        ("kda", "attention"), {"output_gate": "no"},
    ),
    "conv_bias must be True, False or None, got 3": ("kda", {"conv_bias": 3}),
    "conv_bias must be None or False without a convolution": (
        (*LINEAR, *SCANS, *MEMORIES, *BLOCKS, *VECTORS), {"conv_bias": True, "conv_size": 0},
    ),
    "conv_bias must be None or False without a": (("gla", "rwkv7"), {"conv_bias": True}),
    "qk_norm must be one of head, all, got 'l2'": ("attention", {"qk_norm": "l2"}),
    "partial_rotary_factor must be a number in": ("attention", {"partial_rotary_factor": 2}),
    "scale must be a finite number above 0, got 'x'": ("attention", {"scale": "x"}),
    "num_heads must be an integer .*, got 0": (SCANS, {"num_heads": 0}),
    "head_k_dim must be .*, got 0": (SCANS, {"head_k_dim": 0}),
    "head_v_dim must be .*, got -1": (SCANS, {"head_v_dim": -1}),
    "conv_size must be an integer of 0 or more, got -1": (SCANS, {"conv_size": -1}),
    "norm_eps must be a finite number above 0": (SCANS, {"norm_eps": 0}),
    # Sizes of heads are never rounded.
    r"0.75 \* hidden_size must be a multiple of num_heads=4, got 75": (
        "gated_deltanet", {"hidden_size": 100, "num_heads": 4},
    ),
    "got 50: change one of them, or give head_k_dim": ("gla", {"hidden_size": 100, "num_heads": 4}),
    "got 100: change one of them, or give head_k_dim": (
        "longhorn", {"hidden_size": 100, "num_heads": 3},
    ),
    "num_v_heads=3, got 200: change one of them, or give head_v_dim": (
        "mamba2", {"hidden_size": 100, "num_heads": 1, "num_v_heads": 3},
    ),
    # What the papers' grid of features, norms and divisors leaves out.
    r"got 'elu1': did you mean 'elu'\?": ("linear_attention", {"feature_map": "elu1"}),
    "qk_norm must be one of none, l1, l2, got 'L2'": ("deltanet", {"qk_norm": "L2"}),
    "feature_map must be None for gla, got 'elu'": ("gla", {"feature_map": "elu"}),
    "qk_norm must be None for rwkv7, got 'l1'": ("rwkv7", {"qk_norm": "l1"}),
    "output_norm must be None or head for gla, got 'all'": ("gla", {"output_norm": "all"}),
    "output_norm must be one of head, all, none, got 'each'": ("kda", {"output_norm": "each"}),
    "feature_map must keep the 16 channels of a key": ("kda", {"feature_map": "dpfp"}),
    "normalizer must be None or False for deltanet": ("deltanet", {"normalizer": True}),
    "normalizer must be None or True for mlstm": ("mlstm", {"normalizer": False}),
    "normalizer must be None or False for gla": ("gla", {"normalizer": True}),
    "normalizer must be True, False or None, got 1": ("linear_attention", {"normalizer": 1}),
    "which feature_map='identity' may make zero": ("linear_attention", {"normalizer": True}),
    "choose one of elu, relu, dpfp, taylor": ("gated_rfa", {"feature_map": "silu"}),
}  # fmt: skip
CASES = [
    *((name, message, of) for name in NAMES for message, of in SIZES.items()
      if name not in WIDTH_OF_ITS_OWN or "multiple" not in message),
    *((name, message, of) for name in LINEAR for message, of in FRAME.items()),
    *(("gated_deltanet", SHORT, {"longest_horizon": x}) for x in NO_HORIZONS),
    *((name, message, of) for message, (names, of) in OWN.items()
      for name in ([names] if isinstance(names, str) else names)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "message", "options"), CASES)
def test_wrong_options_name_the_argument(name, message, options):
    with pytest.raises(ValueError, match=message):
        MIXERS[name](**({"hidden_size": HIDDEN, "num_heads": 2} | options))


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_numpy_become_those_of_python(name):
    given = {"hidden_size": np.int64(HIDDEN), "num_heads": np.uint8(2)}
    layer = MIXERS[name](**given, **({} if name in SCANS else {"norm_eps": np.float32(0.5)}))
    assert not [x for x in vars(layer).values() if isinstance(x, np.generic)]
    assert layer.num_heads == 2
    state = layer.init_state(np.int64(1))
    layer(torch.zeros(1, 2, HIDDEN), state)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_options_are_type_errors(name):
    with pytest.raises(TypeError, match=rf"{MIXERS[name].__name__}\b.* 'num_head'"):
        MIXERS[name](HIDDEN, num_heads=2, num_head=2)


def test_what_attention_alone_has():
    sizes = {"qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_heads": 3}
    for layer, options, message in (
        (Attention, {"num_heads": 4, "num_kv_heads": 3},
         "num_heads must be a multiple of num_kv_heads=3, got 4"),
        (LatentAttention, sizes | {"kv_lora_rank": 0}, "kv_lora_rank must be an integer of 1 or"),
        (LatentAttention, sizes | {"kv_lora_rank": 8, "qk_rope_head_dim": 3, "rope_theta": 10.0},
         "qk_rope_head_dim must be even for rotary positions"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            layer(HIDDEN, **options)
