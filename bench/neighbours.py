"""`python -m bench.neighbours`: what lies beside the recurrence, on a GPU, and its floor.

Convolution, norms, SwiGLU, gates and the loss of the head at 8x4096 tokens and 2048 channels in
bfloat16, memories that are trained and packed attention at 8x2048: ours, and plain PyTorch.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.sides import Case, run_cases
from bench.timing import Operator
from deltarule.models import linear_next_token_loss
from deltarule.nn import norm, short_conv
from deltarule.nn.layout import make_layout
from deltarule.nn.masked_attention import Sight, attend_by_sight
from deltarule.ops.delta_rule import gate_logits
from deltarule.ops.fused import gates as gates_op
from deltarule.ops.fused import norms as norm_op
from deltarule.ops.fused import swiglu as swiglu_op
from deltarule.shapes import TitansState, TTTState

BATCH, TOKENS, CHANNELS, HEADS, TAPS = 8, 4096, 2048, 16, 4
VOCABULARY = 32000
DEVICE = "cuda"

Tensors = Mapping[str, Tensor]


def beside(
    inputs: Tensors,
    ours: Operator,
    plain: Operator,
    operations: int = 0,
    more_bytes: tuple[int, int] = (0, 0),
) -> Case:
    return Case(inputs, {"deltarule": ours, "PyTorch": plain}, operations, more_bytes)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def convolution(packed: bool = False, step: bool = False) -> Case:
    """Four taps and SiLU; packed as eight documents, or one token for each of 256 sequences."""
    size = (1, BATCH * TOKENS) if packed else (256, 1) if step else (BATCH, TOKENS)
    inputs = {"x": random(*size, CHANNELS), "weight": random(CHANNELS, TAPS, dtype=torch.float32)}
    offsets = torch.arange(BATCH + 1, device=DEVICE) * TOKENS if packed else None
    layout = make_layout(inputs["x"], offsets, None)
    zeros = inputs["x"].new_zeros(BATCH, TAPS - 1, CHANNELS)
    history = 0
    if step:
        inputs["history"] = random(256, TAPS - 1, CHANNELS)
        history = inputs["history"].nbytes

    def call(function: Callable[..., Any], x: Tensors) -> Tensor:
        return function(x["x"], x["weight"], x.get("history", zeros), layout, True)[0]

    ours, plain = short_conv.fused_convolution, short_conv.plain_convolution
    # The history is written, too.
    return beside(inputs, partial(call, ours), partial(call, plain), more_bytes=(history, 0))


def gated_norm() -> Case:
    """RMS norm of each head, times SiLU of a gate."""
    shape = (BATCH, TOKENS, HEADS, CHANNELS // HEADS)
    weight = random(shape[-1], dtype=torch.float32)
    inputs = {"x": random(*shape), "gate": random(*shape), "weight": weight}

    def call(function: Callable[..., Tensor], x: Tensors) -> Tensor:
        return function(x["x"], x["gate"], x["weight"], 1e-5, "silu", False)

    ours, plain = partial(call, norm_op.gated_norm), partial(call, norm.plain_gated_norm)
    return beside(inputs, ours, plain)


def residual_norm() -> Case:
    """The RMS norm of the stream with a branch added."""
    x, y = random(2, BATCH, TOKENS, CHANNELS).unbind()
    return beside(
        {"x": x, "y": y, "weight": random(CHANNELS)},
        lambda x: norm_op.residual_norm(x["x"], x["y"], x["weight"], 1e-5)[1],
        lambda x: norm.plain_residual_norm(**x, eps=1e-5)[1],
        # The sum is written, too, as others read it, and is what the backward pass reads; both
        # branches have one gradient.
        more_bytes=(x.nbytes, -2 * x.nbytes),
    )


def swiglu() -> Case:
    """SiLU of one projection times the other, each 11/4 of the channels wide."""
    gate, up = random(2, BATCH, TOKENS, CHANNELS * 11 // 4).unbind()
    return beside(
        {"gate": gate, "up": up},
        lambda x: swiglu_op.swiglu(x["gate"], x["up"]),
        lambda x: F.silu(x["gate"]) * x["up"],
    )


def decay(*sizes: int) -> Case:
    """The decay of KDA, or of Gated DeltaNet and Mamba-2."""
    logits, A_log = random(BATCH, TOKENS, *sizes), random(HEADS, dtype=torch.float32)
    return beside(
        {"logits": logits, "A_log": A_log, "dt_bias": random(*sizes, dtype=torch.float32)},
        lambda x: gates_op.log_decay(x["logits"], x["A_log"], x["dt_bias"], False)[0],
        lambda x: gate_logits.step_and_log_decay(**x)[1],
    )


def write_strength() -> Case:
    return beside(
        {"logits": random(BATCH, TOKENS, HEADS)},
        lambda x: gates_op.write_strength(x["logits"], 1.0),
        lambda x: gate_logits.write_strength(x["logits"], 1.0),
    )


def head_loss() -> Case:
    """The cross entropy of the head, from its inputs."""
    rows = BATCH * TOKENS
    targets = torch.randint(VOCABULARY, (rows,), device=DEVICE)
    return beside(
        {"x": random(rows, CHANNELS), "weight": random(VOCABULARY, CHANNELS) * 0.02},
        lambda x: linear_next_token_loss(x["x"], x["weight"], targets),
        lambda x: F.cross_entropy(F.linear(x["x"], x["weight"]).float(), targets),
        operations=6 * rows * VOCABULARY * CHANNELS,
    )


def memory(operator: str, channels: int, inner: int) -> Case:
    """The scan of `ttt` or `titans` over half the tokens; `inner` channels between two maps."""
    # The functions of these names hide their modules.
    table = importlib.import_module(f"deltarule.ops.memory.{operator}").IMPLEMENTATIONS
    size, bias = (BATCH, TOKENS // 2, HEADS), int(operator == "ttt")
    inputs = {name: F.normalize(random(*size, channels), dim=-1) for name in "qkv"}
    inputs["beta"] = random(*size, dtype=torch.float32).sigmoid() / channels
    sizes = [(inner, channels), (channels, inner)] if inner else [(channels, channels)]
    maps = tuple(0.1 * random(HEADS, y, x + bias, dtype=torch.float32) for y, x in sizes)
    given: dict[str, Any] = {"lengths": None, "cu_seqlens": None}
    if operator == "ttt":
        norm_weight = torch.ones(HEADS, channels, device=DEVICE)
        given |= {"norm_weight": norm_weight, "norm_bias": 0 * norm_weight, "norm_eps": 1e-6}
        given |= {"step_scale": 1 / torch.arange(1, 17, device=DEVICE)}
        given |= {"initial_state": TTTState.start(maps, BATCH)}
    else:
        momentum = torch.full(size, 0.5, device=DEVICE)
        given |= {"momentum": momentum, "log_decay": -0.01 * momentum, "mini_batch": 16}
        given |= {"initial_state": TitansState.start(maps, BATCH)}
    # A token goes through the maps twice, back through one of them, and writes to each; the
    # backward takes twice that.
    operations = 21 * sum(x[0].numel() for x in maps) * BATCH * (TOKENS // 2) * HEADS
    return beside(
        inputs,
        lambda x: table["triton"].run({**x, **given}).o,
        lambda x: table["torch"].run({**x, **given}).o,
        operations=operations,
    )


def packed_attention(channels: int) -> Case:
    """Half the tokens as eight documents, and all of them with one mask of T x T."""
    tokens, device = BATCH * (TOKENS // 2), torch.device(DEVICE)
    document = torch.arange(tokens, device=device) // (TOKENS // 2)
    offsets = torch.arange(BATCH + 1, device=device) * (TOKENS // 2)
    sight = Sight(tokens, tokens, device, sequence=document, cu_seqlens=offsets)
    _, mask = sight.mask(0, tokens)

    def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, visible).transpose(1, 2)

    return beside(
        {name: random(1, tokens, HEADS, channels) for name in "qkv"},
        lambda x: attend_by_sight(attend, x["q"], x["k"], x["v"], sight),
        lambda x: attend(x["q"], x["k"], x["v"], mask),
        # Half of the pairs, in two products forward and four of the five back.
        operations=6 * channels * HEADS * BATCH * (TOKENS // 2) ** 2,
    )


CASES: dict[str, Callable[[], Case]] = {
    "convolution": convolution,
    "convolution, packed": lambda: convolution(packed=True),
    "convolution, one token": lambda: convolution(step=True),
    "gated norm": gated_norm,
    "norm of a sum": residual_norm,
    "SwiGLU": swiglu,
    "decay, channels": lambda: decay(HEADS, CHANNELS // HEADS),
    "decay, heads": lambda: decay(HEADS),
    "write strength": write_strength,
    "loss of the head": head_loss,
    "TTT-MLP, heads of 64": lambda: memory("ttt", 64, 256),
    "Titans-MLP, heads of 64": lambda: memory("titans", 64, 128),
    "TTT-Linear, heads of 128": lambda: memory("ttt", 128, 0),
    "packed attention, heads of 128": lambda: packed_attention(128),
}


if __name__ == "__main__":
    run_cases("bench.neighbours", __doc__, "neighbour", CASES)
