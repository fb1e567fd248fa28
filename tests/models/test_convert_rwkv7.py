"""RWKV-7 in the layout of flash-linear-attention, beside a loop over tokens in float64."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from deltarule.models import CausalLM
from deltarule.models.files import CONFIG, WEIGHTS
from models.checkpoints import check_round_trip, check_ways_of_reading, close, drawn
from oracles import rwkv7
from oracles.lifted import each_head

HIDDEN, HEADS, SIZE, LAYERS = 128, 2, 64, 3
FIELDS = {
    "model_type": "rwkv7", "vocab_size": 61, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
    "head_dim": SIZE, "num_heads": HEADS, "decay_low_rank_dim": 12, "a_low_rank_dim": 10,
    "v_low_rank_dim": 8, "gate_low_rank_dim": 20, "intermediate_size": 96, "hidden_act": "sqrelu",
    "norm_first": True, "norm_bias": True, "norm_eps": 1e-5, "tie_word_embeddings": False,
    "value_dim": [HIDDEN] * LAYERS,
}  # fmt: skip


def shapes():
    yield from {"model.embeddings.weight": (61, HIDDEN), "lm_head.weight": (61, HIDDEN)}.items()
    norms = ["model.norm", "model.layers.0.pre_norm"]
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        norms += [f"{layer}attn_norm", f"{layer}ffn_norm", f"{layer}attn.g_norm"]
        yield f"{layer}ffn.x_k", (HIDDEN,)
        yield f"{layer}ffn.key.weight", (96, HIDDEN)
        yield f"{layer}ffn.value.weight", (HIDDEN, 96)
        for letter in "rwkvag":
            yield f"{layer}attn.x_{letter}", (1, 1, HIDDEN)
        for letter in "rkvo":
            yield f"{layer}attn.{letter}_proj.weight", (HIDDEN, HIDDEN)
        for letter, rank in {"w": 12, "a": 10, "v": 8, "g": 20}.items():
            if i or letter != "v":
                yield f"{layer}attn.{letter}_lora.lora.0.weight", (rank, HIDDEN)
                yield f"{layer}attn.{letter}_lora.lora.2.weight", (HIDDEN, rank)
                if letter != "g":
                    yield f"{layer}attn.{letter}_lora.lora.2.bias", (HIDDEN,)
        yield f"{layer}attn.k_k", (HIDDEN,)
        yield f"{layer}attn.k_a", (HIDDEN,)
        yield f"{layer}attn.r_k", (HEADS, SIZE)
    for name in norms:
        yield f"{name}.weight", (HIDDEN,)
        yield f"{name}.bias", (HIDDEN,)


@pytest.fixture
def stored(tmp_path):
    torch.manual_seed(0)
    tensors = {name: drawn(name, shape) for name, shape in shapes()}
    for name, x in tensors.items():
        if name.endswith(("bias", "x_k")) or ".x_" in name:
            tensors[name] = 0.5 * torch.randn_like(x)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / CONFIG).write_text(json.dumps(FIELDS))
    save_file(tensors, tmp_path / "theirs" / WEIGHTS)
    return tmp_path / "theirs", {name: x.double() for name, x in tensors.items()}


def layer_norm(x, w, name):
    return F.layer_norm(x, (HIDDEN,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)


def last(x):
    """The token before, zeros before the first."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


def attention(x, w, at, first):
    def lora(letter, given, activation):
        inner = activation(given @ w[f"{at}{letter}_lora.lora.0.weight"].T)
        y = inner @ w[f"{at}{letter}_lora.lora.2.weight"].T
        return y + w.get(f"{at}{letter}_lora.lora.2.bias", 0)

    mixed = {c: x + (last(x) - x) * w[f"{at}x_{c}"] for c in "rwkvag"}
    r, k, v = (mixed[c] @ w[f"{at}{c}_proj.weight"].T for c in "rkv")
    decay = (-0.6065306597126334 * lora("w", mixed["w"], torch.tanh).sigmoid()).exp()
    a = lora("a", mixed["a"], lambda y: y).sigmoid()
    if first is None:
        first = v
    else:
        v = v + (first - v) * lora("v", mixed["v"], lambda y: y).sigmoid()
    gate = lora("g", mixed["g"], torch.sigmoid)
    heads = lambda y: y.unflatten(-1, (HEADS, SIZE))  # noqa: E731
    r, k, v, a, decay = map(heads, (r, k, v, a, decay))
    kk, k = rwkv7.keys(k, heads(w[f"{at}k_k"]), heads(w[f"{at}k_a"]), a)
    o, _ = each_head(rwkv7.recurrence, r, decay, k, v, kk, a)
    o = o.flatten(0, 1).flatten(1)
    o = F.group_norm(o, HEADS, w[f"{at}g_norm.weight"], w[f"{at}g_norm.bias"], 64e-5)
    o = o.view_as(x) + ((r * k * w[f"{at}r_k"]).sum(-1, keepdim=True) * v).flatten(-2)
    return (o * gate) @ w[f"{at}o_proj.weight"].T, first


def logits(w, tokens):
    x, first = w["model.embeddings.weight"][tokens], None
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        x = layer_norm(x, w, f"{layer}pre_norm") if i == 0 else x
        y, first = attention(layer_norm(x, w, f"{layer}attn_norm"), w, f"{layer}attn.", first)
        x = x + y
        h = layer_norm(x, w, f"{layer}ffn_norm")
        h = h + (last(h) - h) * w[f"{layer}ffn.x_k"]
        x = (
            x
            + (h @ w[f"{layer}ffn.key.weight"].T).relu().square() @ w[f"{layer}ffn.value.weight"].T
        )
    return layer_norm(x, w, "model.norm") @ w["lm_head.weight"].T


def test_logits_are_those_of_the_formulas(stored, random_tokens):
    folder, tensors = stored
    tokens = random_tokens(2, 40, vocab_size=61)
    with torch.no_grad():
        close(CausalLM.load(folder)(tokens)[0], logits(tensors, tokens))


def test_ways_of_reading(stored, random_tokens):
    model = CausalLM.load(stored[0])
    with torch.no_grad():
        check_ways_of_reading(model, random_tokens(2, 40, vocab_size=61))
    prompts = random_tokens(1, 9, vocab_size=61).tolist()
    made = model.generate(prompts, max_new_tokens=9, temperature=0)
    assert made == model.generate(prompts, max_new_tokens=9, temperature=0, draft=2)


def test_the_round_trip_is_bit_equal(stored, tmp_path):
    check_round_trip(stored[0], "rwkv7", tmp_path / "again")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_eps": 1e-6}, "norm_eps must be 0.00064 / head_dim=64, got 1e-06"),
        ({"num_heads": 3}, "num_heads must be hidden_size / head_dim=2, got 3"),
        ({"value_dim": [128, 64, 128]}, "value_dim must be one number for all layers"),
        ({"attn": {"layers": [0]}}, "attn must be None"),
        ({"v_low_rank_dim": 9}, "asks for [9, 128]"),
    ],
)
def test_what_does_not_fit_is_named(changes, message, stored):
    (stored[0] / CONFIG).write_text(json.dumps(FIELDS | changes))
    with pytest.raises(ValueError) as caught:
        CausalLM.load(stored[0])
    assert message in str(caught.value)
