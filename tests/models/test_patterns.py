"""The published mixtures of layers, name by name, and what `layer_types` makes of them."""

import pytest

from deltarule.models import PATTERNS, CausalLM, ModelConfig
from deltarule.nn import MIXERS

# The first layers of each, from its paper.
FIRST = {
    "deltanet_sliding_window": "deltanet sliding_window deltanet sliding_window",
    "deltanet_global_attention": "deltanet attention deltanet deltanet",
    "gated_deltanet_h1": "gated_deltanet sliding_window gated_deltanet sliding_window",
    "gated_deltanet_h2": "mamba2 gated_deltanet sliding_window mamba2",
    "gdn_swa_mamba2": "gated_deltanet sliding_window mamba2 gated_deltanet",
    "gdn_mamba2_swa": "gated_deltanet mamba2 sliding_window gated_deltanet",
    "mamba2_swa_gdn": "mamba2 sliding_window gated_deltanet mamba2",
    "samba": "mamba1 sliding_window mamba1 sliding_window",
    "minimax01": " ".join(["lightning"] * 7 + ["attention"] + ["lightning"] * 2),
    "qwen3_next": "gated_deltanet gated_deltanet gated_deltanet attention gated_deltanet",
    "kimi_linear": "kda kda kda attention kda",
}


def config(name: str, num_layers: int = 24, **changes) -> ModelConfig:
    return ModelConfig(
        vocab_size=257, hidden_size=32, num_layers=num_layers, num_heads=2, layer_types=name,
        **changes,
    )  # fmt: skip


def test_a_wrong_name_suggests_the_nearest():
    with pytest.raises(KeyError, match="there is no 'samda': did you mean 'samba'"):
        PATTERNS["samda"]


@pytest.mark.parametrize("name", {**FIRST, **PATTERNS})
def test_layers(name):
    expected = tuple(FIRST[name].split())
    layers = config(name).layer_types
    assert len(layers) == 24
    assert layers[: len(expected)] == expected
    assert set(layers) <= set(MIXERS)
    assert name not in MIXERS
    # Of attention, where it stands behind the layers above.
    counts = {"minimax01": 3, "qwen3_next": 6, "kimi_linear": 6, "deltanet_global_attention": 2}
    assert layers.count("attention") == counts.get(name, 0)


@pytest.mark.parametrize(("num_layers", "places"), [(4, (1, 2)), (24, (1, 12)), (26, (1, 13))])
def test_two_global_layers_are_the_second_and_the_one_after_the_middle(num_layers, places):
    layers = config("deltanet_global_attention", num_layers).layer_types
    assert tuple(i for i, layer in enumerate(layers) if layer == "attention") == places


def test_a_tuple_of_one_pattern_is_that_pattern_and_comes_back_written_out():
    written = config(("samba",))
    assert written.layer_types == config("samba").layer_types
    assert ModelConfig.from_json(written.to_json()) == written


def test_attention_may_have_its_own_number_of_heads():
    model = CausalLM(config("gated_deltanet_h1", 2, num_attention_heads=4, num_kv_heads=2))
    recurrent, attention = (block.mixer for block in model.blocks)
    assert (recurrent.num_heads, attention.num_heads, attention.num_kv_heads) == (2, 4, 2)
