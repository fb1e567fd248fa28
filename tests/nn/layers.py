"""Small layers away from their starting values, and projections to try a rule on."""

from types import SimpleNamespace

import torch
from torch import Tensor

from deltarule.nn import MIXERS, RULES, Mixer, State
from deltarule.nn.layout import make_layout
from deltarule.nn.rule import LayerCall, Projections, Rule
from deltarule.ops.delta_rule import definition

HIDDEN = 32
NAMES = list(MIXERS)
ATTENTION = ("attention", "sliding_window")
RECURRENT = [name for name in NAMES if name not in ATTENTION]
# Those on the frame of DeltaMixer, with the options of its constructor.
LINEAR = list(RULES)

# Options that make a layer ask more of the frame than its defaults do.
OPTIONS: dict[str, dict[str, object]] = {
    "attention": {"num_heads": 4, "num_kv_heads": 2},
    "sliding_window": {"num_heads": 4, "num_kv_heads": 2, "window": 5},
    "mamba2": {"num_heads": 1, "num_v_heads": 4, "head_k_dim": 8},
    "rwkv7": {"num_heads": 2, "head_k_dim": 8, "layer_index": 1, "num_layers": 3},
    "lightning": {"num_heads": 2, "head_k_dim": 8, "layer_index": 1, "num_layers": 3},
    "gated_deltanet": {"num_heads": 2, "num_v_heads": 4, "head_k_dim": 8, "head_v_dim": 8},
    "delta_product": {"num_heads": 2, "head_k_dim": 8, "n_steps": 3},
    "gla": {"num_heads": 2, "head_k_dim": 8, "head_v_dim": 16, "conv_size": 4},
    "mamba1": {"num_heads": 2, "head_k_dim": 4},
    "signed_mamba1": {"num_heads": 2, "head_k_dim": 4},
    "s4": {"num_heads": 2, "head_k_dim": 4},
    "s4d": {"num_heads": 2, "head_k_dim": 4},
    "lru": {"num_heads": 2, "head_k_dim": 8, "head_v_dim": 6},
    **{name: {"num_heads": 2, "head_v_dim": 8} for name in ("hgrn", "rg_lru", "rwkv4")},
    "longhorn_released": {"num_heads": 2, "head_k_dim": 4},
    "dfw": {"num_heads": 2, "head_k_dim": 6, "head_v_dim": 8, "conv_size": 4},
    "hyena": {"num_heads": 2, "head_k_dim": 8, "filter_size": 23},
    "multi_head_hyena": {"num_heads": 2, "head_k_dim": 8, "head_v_dim": 4, "filter_size": 23},
    **{
        f"{kind}_deltanet": {"num_heads": 2, "head_k_dim": 4, "num_slots": 3}
        for kind in ("multi_head", "multi_kv", "multi_value", "multi_key", "multi_query", "block")
    },
    "abc": {"num_heads": 2, "num_slots": 5},
    **{
        name: {"num_heads": 2, "head_k_dim": 8, "window": 5, "num_persistent": 3, "mini_batch": 4}
        for name in ("titans_mac", "titans_mag", "titans_mal")
    },
    "gsa": {"num_heads": 2, "num_slots": 5, "conv_size": 3},
}


def make(name: str, dtype: torch.dtype = torch.float32, **options: object) -> Mixer:
    """Build the named layer and move its parameters off zeros and ones."""
    torch.manual_seed(0)
    given = OPTIONS.get(name, {"num_heads": 2, "head_k_dim": 8})
    layer = MIXERS[name](HIDDEN, **(given | options))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return layer.to(dtype)


def inputs(batch: int, tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draw x of unit size."""
    torch.manual_seed(1)
    return torch.randn(batch, tokens, HIDDEN, dtype=dtype)


def call_of(layer: Mixer, x: Tensor) -> LayerCall:
    """A call with x alone, at the start of its sequences."""
    return LayerCall(x, make_layout(x, None, None), layer.init_state(len(x)), State(), {})


def config(**changes) -> SimpleNamespace:
    """A stand-in for deltarule.models.ModelConfig, which nn must not know."""
    unset = (
        *("num_v_heads", "head_k_dim", "head_v_dim", "num_kv_heads", "num_attention_heads"),
        *("output_gate", "n_steps", "window", "mini_batch", "spectrum", "num_persistent"),
        *("feature_map", "qk_norm", "normalizer"),
    )
    sizes = {"hidden_size": HIDDEN, "num_layers": 3, "layer_types": ("rwkv7",) * 3, "num_heads": 2}
    others = {"conv_size": 4, "beta_max": 1.0, "rope_theta": 10000.0, "norm_eps": 1e-5}
    given = dict.fromkeys(unset) | sizes | others
    return SimpleNamespace(**(given | changes))


B, T, H, HV, K, V = 2, 9, 2, 4, 5, 3
OPERATORS = {"delta_rule": definition.delta_rule, "dplr": definition.delta_rule}


def draw(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64)


def draw_projections(n_steps: int = 1, heads: int = H, **others: object) -> Projections:
    """q, k and v [B, T*n, heads, K or V] of unit size, and whatever else is named."""
    q, k = draw(B, T, heads, K), draw(B, T * n_steps, heads, K)
    return Projections(q=q, k=k, v=draw(B, T * n_steps, HV, V), n_steps=n_steps, **others)


def run(rule: Rule, projections: Projections) -> Tensor:
    """o [B, T, HV, V] by the rule."""
    output = OPERATORS[rule.operator](**rule.arguments(projections))
    return rule.read_out_function(output.o, projections)


def largest_error(o: Tensor, expected: Tensor) -> float:
    return ((o - expected).abs().max() / expected.abs().max()).item()
