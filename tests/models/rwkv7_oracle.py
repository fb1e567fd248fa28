"""RWKV-7 in the layout of flash-linear-attention, transcribed: a loop over tokens in float64."""

import torch
import torch.nn.functional as F

from models.fla_oracle import Stored
from oracles import rwkv7
from oracles.lifted import each_head

HIDDEN, HEADS, SIZE, LAYERS = 128, 2, 64, 3
FIELDS = {
    "vocab_size": 61, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "head_dim": SIZE,
    "num_heads": HEADS, "decay_low_rank_dim": 12, "a_low_rank_dim": 10, "v_low_rank_dim": 8,
    "gate_low_rank_dim": 20, "intermediate_size": 96, "hidden_act": "sqrelu", "norm_first": True,
    "norm_bias": True, "norm_eps": 1e-5, "value_dim": [HIDDEN] * LAYERS,
}  # fmt: skip


def layer_norm(x, w, name):
    return F.layer_norm(x, (HIDDEN,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)


def last(x):
    """The token before, zeros before the first."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


def attention(x, w, at, first):
    def lora(letter, given, activation):
        inner = activation(given @ w[f"{at}{letter}_lora.lora.0.weight"].T)
        y = inner @ w[f"{at}{letter}_lora.lora.2.weight"].T
        return y if letter == "g" else y + w[f"{at}{letter}_lora.lora.2.bias"]

    mixed = {c: x + (last(x) - x) * w[f"{at}x_{c}"][0, 0] for c in "rwkvag"}
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


def logits(config, tensors, tokens):
    """[B, T, vocab_size] from tokens [B, T]; every tensor that is stored counts."""
    w = Stored(tensors)
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
    y = layer_norm(x, w, "model.norm") @ w["lm_head.weight"].T
    assert w.read == {*tensors}
    return y
