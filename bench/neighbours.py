"""`python -m bench.neighbours`: what lies beside the recurrence, on a GPU, and its floor.

Convolution, norms, SwiGLU, gates and the loss of the head at 8x4096 tokens and 2048 channels in
bfloat16, memories that are trained and packed attention at 8x2048: ours, plain PyTorch, and FLA's,
causal-conv1d's and Liger-Kernel's where installed. The floor is the time of the bytes that must
move at the bandwidth of a large copy measured in the same run; for the head it is that of three
matrix products at the measured rate, for a memory and for attention the sum of both.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import results
from bench.timing import copy_bandwidth, graph_ms, matrix_rate
from bench.worker import reason
from deltarule.models import linear_next_token_loss
from deltarule.nn import norm, short_conv
from deltarule.nn.layout import make_layout
from deltarule.nn.masked_attention import Sight, attend_by_sight
from deltarule.ops.delta_rule import gate_maps
from deltarule.ops.fused import gates as gates_op
from deltarule.ops.fused import norms as norm_op
from deltarule.ops.fused import swiglu as swiglu_op
from deltarule.shapes import TitansState, TTTState

BATCH, TOKENS, CHANNELS, HEADS, TAPS = 8, 4096, 2048, 16, 4
VOCABULARY = 32000
REPEATS = 20
DEVICE = "cuda"

Tensors = Mapping[str, Tensor]
Run = Callable[[Tensors], Tensor]


class Case(NamedTuple):
    """One map: its inputs, whoever computes it, and what the two passes must move or multiply."""

    inputs: Tensors
    sides: Mapping[str, Run]
    forward_bytes: int = 0
    backward_bytes: int = 0
    products: int = 0


def found(report: results.Row) -> Iterator[results.Found]:
    """The figures of all cases."""
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    report["ceilings"] = {"copy_TB_s": bandwidth / 1e12, "matrix_TFLOP_s": rate / 1e12}
    for name, make in CASES.items():
        yield from figures(name, make(), bandwidth, rate)


def figures(name: str, case: Case, bandwidth: float, rate: float) -> Iterator[results.Found]:
    # Forward and backward take one and two of the head's three products.
    both = case.forward_bytes + case.backward_bytes
    passes = {
        "forward": (forward, case.forward_bytes / bandwidth + case.products / 3 / rate),
        "forward+backward": (forward_backward, both / bandwidth + case.products / rate),
    }
    for title, (timed, floor) in passes.items():
        for side, run in case.sides.items():
            try:
                row: results.Row = {"ms": timed(run, case.inputs), "floor_ms": 1e3 * floor}
            # A peer that fails is a figure too.
            except Exception as error:
                row = {"error": reason(error)}
            yield side, {"kind": "neighbour", "case": name, "pass": title}, row
    torch.cuda.empty_cache()


def forward(run: Run, inputs: Tensors) -> float:
    """Milliseconds of the forward pass where no backward follows."""

    def call() -> object:
        with torch.no_grad():
            return run(inputs)

    return graph_ms([call], REPEATS)


def forward_backward(run: Run, inputs: Tensors) -> float:
    """Milliseconds of both passes, gradients by every input."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    weight = torch.randn_like(run(leaves)).detach()

    def call() -> object:
        return torch.autograd.grad(run(leaves), list(leaves.values()), weight)

    return graph_ms([call], REPEATS)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def convolution(packed: bool = False) -> Case:
    """Four taps and SiLU; packed as eight documents."""
    size = (1, BATCH * TOKENS) if packed else (BATCH, TOKENS)
    inputs = {"x": random(*size, CHANNELS), "weight": random(CHANNELS, TAPS, dtype=torch.float32)}
    offsets = None
    if packed:
        offsets = torch.arange(BATCH + 1, device=DEVICE) * TOKENS
    layout = make_layout(inputs["x"], offsets, None)
    history = inputs["x"].new_zeros(BATCH, TAPS - 1, CHANNELS)

    def call(x: Tensors) -> tuple[Any, ...]:
        return x["x"], x["weight"], history, layout, True

    sides: dict[str, Run] = {
        "deltarule": lambda x: short_conv.fused_convolution(*call(x))[0],
        "PyTorch": lambda x: short_conv.plain_convolution(*call(x))[0],
    }
    if fla := imported("fla.modules.convolution"):
        sides["FLA"] = lambda x: fla.causal_conv1d(
            x["x"], x["weight"], activation="silu", cu_seqlens=offsets
        )[0]
    if not packed and (peer := imported("causal_conv1d")):
        sides["causal-conv1d"] = lambda x: (
            peer.causal_conv1d_fn(x["x"].mT, x["weight"], activation="silu").mT
        )
    moved = inputs["x"].nbytes
    return Case(inputs, sides, 2 * moved, 3 * moved)


def convolution_step() -> Case:
    """One token for each of 256 sequences."""
    inputs = {
        "x": random(256, 1, CHANNELS),
        "weight": random(CHANNELS, TAPS, dtype=torch.float32),
        "history": random(256, TAPS - 1, CHANNELS),
    }
    layout = make_layout(inputs["x"], None, None)

    def call(x: Tensors) -> tuple[Any, ...]:
        return x["x"], x["weight"], x["history"], layout, True

    moved = 2 * (inputs["x"].nbytes + inputs["history"].nbytes)
    sides: dict[str, Run] = {
        "deltarule": lambda x: short_conv.fused_convolution(*call(x))[0],
        "PyTorch": lambda x: short_conv.plain_convolution(*call(x))[0],
    }
    return Case(inputs, sides, moved, moved)


def gated_norm() -> Case:
    """RMS norm of each head, times SiLU of a gate."""
    shape = (BATCH, TOKENS, HEADS, CHANNELS // HEADS)
    weight = random(shape[-1], dtype=torch.float32)
    inputs = {"x": random(*shape), "gate": random(*shape), "weight": weight}

    def call(x: Tensors) -> tuple[Any, ...]:
        return x["x"], x["gate"], x["weight"], 1e-5, "silu", False

    sides: dict[str, Run] = {
        "deltarule": lambda x: norm_op.gated_norm(*call(x)),
        "PyTorch": lambda x: norm.plain_gated_norm(*call(x)),
    }
    if fla := imported("fla.modules.fused_norm_gate"):
        sides["FLA"] = lambda x: fla.rms_norm_gated(
            x["x"], x["gate"], x["weight"], None, activation="silu", eps=1e-5
        )
    moved = inputs["x"].nbytes
    return Case(inputs, sides, 3 * moved, 5 * moved)


def residual_norm() -> Case:
    """The RMS norm of the stream with a branch added; the sum is written too, as others read it."""
    x, y = random(2, BATCH, TOKENS, CHANNELS).unbind()
    inputs = {"x": x, "y": y, "weight": random(CHANNELS)}
    sides: dict[str, Run] = {
        "deltarule": lambda x: norm_op.residual_norm(x["x"], x["y"], x["weight"], 1e-5)[1],
        "PyTorch": lambda x: norm.plain_residual_norm(**x, eps=1e-5)[1],
    }
    return Case(inputs, sides, 4 * x.nbytes, 3 * x.nbytes)


def swiglu() -> Case:
    """SiLU of one projection times the other, each 11/4 of the channels wide."""
    shape = (BATCH, TOKENS, CHANNELS * 11 // 4)
    inputs = {"gate": random(*shape), "up": random(*shape)}
    sides: dict[str, Run] = {
        "deltarule": lambda x: swiglu_op.swiglu(x["gate"], x["up"]),
        "PyTorch": lambda x: F.silu(x["gate"]) * x["up"],
    }
    if fla := imported("fla.modules.activations"):
        sides["FLA"] = lambda x: fla.swiglu(x["gate"], x["up"])
    moved = inputs["gate"].nbytes
    return Case(inputs, sides, 3 * moved, 5 * moved)


def decay(per_channel: bool) -> Case:
    """The decay of KDA, or of Gated DeltaNet and Mamba-2."""
    sizes = (HEADS, CHANNELS // HEADS) if per_channel else (HEADS,)
    inputs = {
        "logits": random(BATCH, TOKENS, *sizes),
        "A_log": random(HEADS, dtype=torch.float32),
        "dt_bias": random(*sizes, dtype=torch.float32),
    }

    sides: dict[str, Run] = {
        "deltarule": lambda x: gates_op.log_decay(x["logits"], x["A_log"], x["dt_bias"], False)[0],
        "PyTorch": lambda x: gate_maps.step_and_log_decay(**x)[1],
    }
    count = inputs["logits"].numel()
    return Case(inputs, sides, (2 + 4) * count, (2 + 4 + 2) * count)


def write_strength() -> Case:
    inputs = {"logits": random(BATCH, TOKENS, HEADS)}
    sides: dict[str, Run] = {
        "deltarule": lambda x: gates_op.write_strength(x["logits"], 1.0),
        "PyTorch": lambda x: gate_maps.write_strength(x["logits"], 1.0),
    }
    count = inputs["logits"].numel()
    return Case(inputs, sides, (2 + 4) * count, (2 + 4 + 2) * count)


def head_loss() -> Case:
    """The cross entropy of the head, from its inputs."""
    rows = BATCH * TOKENS
    inputs = {"x": random(rows, CHANNELS), "weight": random(VOCABULARY, CHANNELS) * 0.02}
    targets = torch.randint(VOCABULARY, (rows,), device=DEVICE)
    sides: dict[str, Run] = {
        "deltarule": lambda x: linear_next_token_loss(x["x"], x["weight"], targets),
        "PyTorch": lambda x: F.cross_entropy(F.linear(x["x"], x["weight"]).float(), targets),
    }
    if liger := imported("liger_kernel.transformers.functional"):
        sides["Liger-Kernel"] = lambda x: liger.liger_fused_linear_cross_entropy(
            x["x"], x["weight"], targets
        )
    if fla := imported("fla.modules.fused_linear_cross_entropy"):
        sides["FLA"] = lambda x: fla.fused_linear_cross_entropy_loss(x["x"], targets, x["weight"])
    return Case(inputs, sides, products=6 * rows * VOCABULARY * CHANNELS)


def memory(operator: str, channels: int, inner: int) -> Case:
    """The scan of `ttt` or `titans` over half the tokens; `inner` channels between two maps."""
    # The functions of these names hide their modules.
    table = importlib.import_module(f"deltarule.ops.memory.{operator}").IMPLEMENTATIONS
    size, bias = (BATCH, TOKENS // 2, HEADS), int(operator == "ttt")
    inputs = {name: F.normalize(random(*size, channels), dim=-1) for name in "qkv"}
    inputs["beta"] = random(*size, dtype=torch.float32).sigmoid() / channels
    sizes = [(inner, channels), (channels, inner)] if inner else [(channels, channels)]
    maps = tuple(
        0.1 * random(HEADS, outputs, inputs + bias, dtype=torch.float32)
        for outputs, inputs in sizes
    )
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
    sides: dict[str, Run] = {
        "deltarule": lambda x: table["triton"].run({**x, **given}).o,
        "PyTorch": lambda x: table["torch"].run({**x, **given}).o,
    }
    # A token goes through the maps twice, back through one of them, and writes to each; the
    # backward takes twice that.
    numbers = sum(x[0].numel() for x in maps)
    moved = inputs["q"].nbytes
    return Case(inputs, sides, 4 * moved, 7 * moved, 21 * numbers * BATCH * (TOKENS // 2) * HEADS)


def packed_attention(channels: int) -> Case:
    """Half the tokens as eight documents, and all of them with one mask of T x T."""
    tokens, device = BATCH * (TOKENS // 2), torch.device(DEVICE)
    inputs = {name: random(1, tokens, HEADS, channels) for name in "qkv"}
    document = torch.arange(tokens, device=device) // (TOKENS // 2)
    offsets = torch.arange(BATCH + 1, device=device) * (TOKENS // 2)
    sight = Sight(tokens, tokens, device, sequence=document, cu_seqlens=offsets)
    _, mask = sight.mask(0, tokens)

    def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, visible).transpose(1, 2)

    sides: dict[str, Run] = {
        "deltarule": lambda x: attend_by_sight(attend, x["q"], x["k"], x["v"], sight),
        "PyTorch": lambda x: attend(x["q"], x["k"], x["v"], mask),
    }
    # Half of the pairs, in two products forward and four of the five back.
    products = 6 * channels * HEADS * BATCH * (TOKENS // 2) ** 2
    return Case(inputs, sides, 4 * inputs["q"].nbytes, 7 * inputs["q"].nbytes, products)


def imported(module: str) -> Any:
    """The module of a peer, or None where it is not installed."""
    if find_spec(module.partition(".")[0]) is None:
        return None
    return importlib.import_module(module)


CASES: dict[str, Callable[[], Case]] = {
    "convolution": convolution,
    "convolution, packed": lambda: convolution(packed=True),
    "convolution, one token": convolution_step,
    "gated norm": gated_norm,
    "norm of a sum": residual_norm,
    "SwiGLU": swiglu,
    "decay, channels": lambda: decay(per_channel=True),
    "decay, heads": lambda: decay(per_channel=False),
    "write strength": write_strength,
    "loss of the head": head_loss,
    "TTT-MLP, heads of 64": lambda: memory("ttt", 64, 256),
    "Titans-MLP, heads of 64": lambda: memory("titans", 64, 128),
    "TTT-Linear, heads of 128": lambda: memory("ttt", 128, 0),
    "packed attention, heads of 128": lambda: packed_attention(128),
}


if __name__ == "__main__":
    results.run_program("bench.neighbours", __doc__, found)
