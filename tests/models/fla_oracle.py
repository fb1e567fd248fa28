"""The models of flash-linear-attention, transcribed: the definition loops over tokens.

`logits(config, tensors, tokens)` takes a checkpoint as it is stored, computed in float64.
"""

import torch
import torch.nn.functional as F

from deltarule.ops.delta_rule import definition
from oracles import rwkv7
from oracles.lifted import each_head, unit


class Stored:
    """Tensors by what follows a prefix in their names; those that are read are noted."""

    def __init__(self, tensors, prefix="", read=None):
        self.tensors, self.prefix = tensors, prefix
        self.read = set() if read is None else read

    def __getitem__(self, name):
        self.read.add(self.prefix + name)
        return self.tensors[self.prefix + name].double()

    def under(self, prefix):
        return Stored(self.tensors, self.prefix + prefix, self.read)


def logits(config, tensors, tokens):
    """[B, T, vocab_size] from tokens [B, T]; every tensor that is stored counts."""
    w, eps = Stored(tensors), config["norm_eps"]
    if config["model_type"] == "rwkv7":
        y = rwkv7_logits(w, tokens)
        assert w.read == {*tensors}
        return y
    x = w["model.embeddings.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        part = w.under(f"model.layers.{i}.")
        own = part.under("attn.")
        own.convolved = config.get("use_short_conv")
        if config["model_type"] == "hgrn2":
            share = w["model.lower_bounds"].softmax(0)
            own.lower_bound = share.cumsum(0)[i] - share[0]
        hybrid = i in (config.get("attn") or {"layers": []})["layers"]
        mixer = attention if hybrid else MIXERS[config["model_type"]]
        x = x + mixer(rms(x, part["attn_norm.weight"], eps), own, config)
        h = rms(x, part["mlp_norm.weight"], eps)
        inner = F.silu(h @ part["mlp.gate_proj.weight"].T) * (h @ part["mlp.up_proj.weight"].T)
        x = x + inner @ part["mlp.down_proj.weight"].T
    head = "model.embeddings.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    y = rms(x, w["model.norm.weight"], eps) @ w[head].T
    assert w.read == {*tensors}
    return y


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def stream(x, w, name, size, silu=True, silu_without_conv=True):
    """A projection, its convolution if there is one, and heads of `size` channels."""
    y = x @ w[f"{name}_proj.weight"].T
    if w.convolved:
        taps = w[f"{name}_conv1d.weight"]
        padded = F.pad(y.transpose(1, 2), (taps.shape[-1] - 1, 0))
        y = F.conv1d(padded, taps, groups=len(taps)).transpose(1, 2)
    if silu and (w.convolved or silu_without_conv):
        y = F.silu(y)
    return y.unflatten(-1, (-1, size))


def finish(o, x, w, config, *, norm="o_norm", gate=F.silu):
    """The norm of each head, the gate if there is one, the output projection."""
    o = rms(o, w[f"{norm}.weight"], config["norm_eps"]).flatten(-2)
    if config.get("use_gate") or config.get("use_output_gate"):
        o = o * gate(x @ w["g_proj.weight"].T)
    elif config["model_type"] == "kda":
        low = x @ w["g_proj.0.weight"].T
        o = o * gate(low @ w["g_proj.1.weight"].T + w["g_proj.1.bias"])
    return o @ w["o_proj.weight"].T


def recurrence(q, k, v, *, beta=None, log_decay=None, steps=1):
    """The definition's output; shapes [B, T, H, size]."""
    given = {"beta": beta, "log_decay": log_decay, "n_steps": steps}
    return definition.delta_rule(q, k, v, **given)[0]


def strength(x, w, config):
    return (x @ w["b_proj.weight"].T).sigmoid() * (2 if config["allow_neg_eigval"] else 1)


def head_decay(x, w):
    return -w["A_log"].exp() * F.softplus(x @ w["a_proj.weight"].T + w["dt_bias"])


def sizes(config):
    if "head_dim" in config:
        return config["head_dim"], int(config["head_dim"] * config["expand_v"])
    width = config["hidden_size"]
    return (round(width * config[n]) // config["num_heads"] for n in ("expand_k", "expand_v"))


MAPS = {"elu": lambda y: F.elu(y) + 1, "relu": F.relu, "identity": lambda y: y}


def delta_net(x, w, config):
    K, V = sizes(config)
    silu = config["qk_activation"] == "silu"
    phi = MAPS.get(config["qk_activation"], MAPS["identity"])
    norm = unit if config["qk_norm"] == "l2" else lambda y: y / y.sum(-1, keepdim=True)
    q, k = (norm(phi(stream(x, w, name, K, silu=silu))) for name in "qk")
    o = recurrence(q, k, stream(x, w, "v", V), beta=strength(x, w, config))
    return finish(o, x, w, config)


def gated_deltanet(x, w, config, decay=None, gate=F.silu):
    K, V = sizes(config)
    v = stream(x, w, "v", V)
    q, k = (unit(stream(x, w, name, K)) for name in "qk")
    decay = head_decay(x, w) if decay is None else decay
    o = recurrence(q, k, v, beta=strength(x, w, config), log_decay=decay)
    return finish(o, x, w, config, gate=gate)


def kda(x, w, config):
    K, _ = sizes(config)
    logits = x @ w["f_proj.0.weight"].T @ w["f_proj.1.weight"].T + w["dt_bias"]
    logits, rate = logits.unflatten(-1, (-1, K)), w["A_log"].exp()[:, None]
    bound = config.get("lower_bound")
    decay = -rate * F.softplus(logits) if bound is None else bound * torch.sigmoid(rate * logits)
    return gated_deltanet(x, w, config, decay, torch.sigmoid)


def gated_deltaproduct(x, w, config):
    K, V = sizes(config)
    n, H = config["num_householder"], config["num_heads"]

    def steps(y):
        return y.unflatten(2, (n, H)).flatten(1, 2)

    q, k = unit(stream(x, w, "q", K)), unit(steps(stream(x, w, "k", K)))
    beta = steps(strength(x, w, config))
    decay = head_decay(x, w) if config["use_forget_gate"] else None
    o = recurrence(q, k, steps(stream(x, w, "v", V)), beta=beta, log_decay=decay, steps=n)
    return finish(o, x, w, config)


def swish_norm(config):
    return "g_norm_swish_gate" if config["use_output_gate"] else "g_norm"


def gla(x, w, config):
    K, V = sizes(config)
    q, k = (stream(x, w, name, K, silu_without_conv=False) for name in "qk")
    v = stream(x, w, "v", V, silu_without_conv=False)
    low = x @ w["gk_proj.0.weight"].T
    assert low.shape[-1] == 16
    decay = F.logsigmoid(low @ w["gk_proj.1.weight"].T + w["gk_proj.1.bias"]) / 16
    o = recurrence(q, k, v, log_decay=decay.unflatten(-1, (-1, K)))
    return finish(o, x, w, config, norm=swish_norm(config))


def retnet(x, w, config):
    K, V = sizes(config)
    q, k, v = (stream(x, w, n, size, silu=False) for n, size in (("q", K), ("k", K), ("v", V)))
    decay = (1 - 2.0 ** (-5 - torch.arange(q.shape[2], dtype=torch.float64))).log()
    o = recurrence(turned(q, 1e4), turned(k, 1e4), v, log_decay=decay.expand(*x.shape[:2], -1))
    return finish(o, x, w, config, norm=swish_norm(config))


def linear_attn(x, w, config):
    K, V = sizes(config)
    q, k, v = (stream(x, w, n, size, silu=False) for n, size in (("q", K), ("k", K), ("v", V)))
    phi = MAPS[config["feature_map"]]
    return finish(recurrence(phi(q), phi(k), v), x, w, config, norm="norm")


def hgrn2(x, w, config):
    K = config["expand_ratio"]
    q = F.silu(stream(x, w, "q", K, silu=False))
    bound = w.lower_bound.unflatten(-1, (-1, K))
    decay = bound + (1 - bound) * stream(x, w, "f", K, silu=False).sigmoid()
    o = recurrence(q, 1 - decay, stream(x, w, "i", K, silu=False), log_decay=decay.log())
    return rms(o.flatten(-2), w["g_norm.weight"], 1e-5) @ w["o_proj.weight"].T


def turned(y, base):
    """Channels i and i + D/2 of [B, T, H, D] turn as one complex number."""
    half = y.shape[-1] // 2
    rates = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(y.shape[1])[:, None, None] * rates
    z = torch.complex(*y.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], -1)


def attention(x, w, config):
    """Softmax attention."""
    options = config["attn"]
    size = config["hidden_size"] // options["num_heads"]
    q, k, v = ((x @ w[f"{n}_proj.weight"].T).unflatten(-1, (-1, size)) for n in "qkv")
    q, k, v = (y.transpose(1, 2) for y in (*(turned(y, options["rope_theta"]) for y in (q, k)), v))
    place = torch.arange(x.shape[1])
    near = place[:, None] - place
    seen = (near >= 0) & (near < (options["window_size"] or len(place)))
    o = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    return o.transpose(1, 2).flatten(2) @ w["o_proj.weight"].T


OURS = (delta_net, gated_deltanet, kda, gated_deltaproduct, gla, retnet, linear_attn, hgrn2)
MIXERS = {mixer.__name__: mixer for mixer in OURS}


# ---- RWKV-7 --------------------------------------------------------------------------------------

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


def rwkv7_attention(x, w, at, first):
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


def rwkv7_logits(w, tokens):
    x, first = w["model.embeddings.weight"][tokens], None
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        x = layer_norm(x, w, f"{layer}pre_norm") if i == 0 else x
        y, first = rwkv7_attention(layer_norm(x, w, f"{layer}attn_norm"), w, f"{layer}attn.", first)
        x = x + y
        h = layer_norm(x, w, f"{layer}ffn_norm")
        h = h + (last(h) - h) * w[f"{layer}ffn.x_k"]
        x = (
            x
            + (h @ w[f"{layer}ffn.key.weight"].T).relu().square() @ w[f"{layer}ffn.value.weight"].T
        )
    return layer_norm(x, w, "model.norm") @ w["lm_head.weight"].T
