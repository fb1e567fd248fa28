"""The kernels of the operators beside the delta rule."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ahead import Launch, main, recording
from torch import Tensor

from deltarule.nn.mlp import GatedProducts
from deltarule.ops.fused.convolution_step_triton import Stream, Within, convolution_step
from deltarule.ops.fused.cross_entropy import cross_entropy
from deltarule.ops.fused.few_rows_gluon import few_rows
from deltarule.ops.fused.gates import log_decay, write_strength
from deltarule.ops.fused.likeliest_triton import likeliest
from deltarule.ops.fused.norms import GatedNorm, gated_norm, residual_norm
from deltarule.ops.fused.norms_triton import gated_norm_gradients
from deltarule.ops.fused.one_row_triton import normed_row, one_row
from deltarule.ops.fused.short_conv import short_conv
from deltarule.ops.fused.swiglu import swiglu
from deltarule.ops.memory.torch.triton_scan import Scan
from deltarule.ops.memory.triton import passes as memory_passes
from deltarule.ops.mesa import triton as mesa
from deltarule.ops.mesa.torch import Systems
from deltarule.ops.selective_scan.inputs import ScanInputs
from deltarule.ops.selective_scan.triton import passes
from deltarule.ops.slstm.inputs import SLSTMInputs
from deltarule.ops.slstm.triton import heads as slstm
from deltarule.ops.slstm.triton import split as split_slstm

BF16, FP32 = torch.bfloat16, torch.float32


def scan_inputs(form: str, value_size: int, key_size: int, dtype: torch.dtype) -> ScanInputs:
    """Tensors that nobody fills: of Mamba, S4, DFW, the released Longhorn, or all at once."""
    tokens, heads = 256, 2

    def of(*shape: int, like: torch.dtype = FP32) -> Tensor:
        return torch.empty(shape, dtype=like)

    constant = "S4" in form
    each_value, each_key = (1, tokens, heads, value_size), (1, tokens, heads, key_size)
    channels = (heads, value_size, key_size) if constant else (1, tokens, 1, key_size)
    forms = {
        "delta": form in ("Mamba", "S4", "all", "all S4"), "left": form in ("DFW", "all", "all S4"),
        "beta": form in ("Longhorn", "all", "all S4"),
    }  # fmt: skip
    return ScanInputs(
        of(*channels, like=dtype), of(*channels, like=dtype), of(*each_value, like=dtype),
        of(*each_value) if forms["delta"] else None,
        of(heads, value_size, key_size) if forms["delta"] else None,
        of(*each_value) if forms["left"] else None, of(*each_key) if forms["left"] else None,
        of(*each_value, like=dtype) if forms["beta"] else None,
        of(1, heads, value_size, key_size), None, key_size**-0.5,
    )  # fmt: skip


def scan(inputs: ScanInputs) -> None:
    """Forward and backward, the states saved or not."""
    for save in (False, True):
        o, final, saved = passes.forward(inputs, save)
        passes.backward(torch.empty_like(o), torch.empty_like(final), inputs, saved)


def solver(size: int, key_size: int) -> None:
    """The conjugate gradients of chunks of so many tokens."""
    of = (2, 1, 4)
    rows = *of, size, key_size
    shapes = rows, rows, (*of, size, size), (*of, size, 1), (*of, key_size, key_size)
    tensors = map(torch.empty, (*shapes, (4, 1, key_size)))
    mesa.conjugate_gradients(Systems(*tensors, None, 30, "triton"), 30)


def memory(
    operator: str, slots: int, channels: int, inner: int, packed: bool, values: int = 0
) -> None:
    """Forward and backward of a memory of two maps with so many channels inside, or (0) of one.

    The value channels are `values`, if there are not as many as key channels.
    """
    of, bias, values = (8, 2, 4), int(operator == "TTT"), values or channels
    shapes = [(*of, slots, size) for size in (channels, channels, values)]
    shapes += [(*of, 4, slots), (*of, 4), (*of, slots, slots), of[:2]]
    owner = torch.empty(of[:2], dtype=torch.int64) if packed else None
    numbers = values * (channels + bias)
    if inner:
        numbers = inner * (channels + bias) + values * (inner + bias)
    start, norm = torch.empty(5, 4, 2 if bias else 3, numbers), [None, None]
    norm = [torch.empty(4, channels)] * 2 if bias else norm
    inputs = Scan(*map(torch.empty, shapes), owner, start, *norm, 1e-6, inner)
    memory_passes.forward(inputs)
    memory_passes.backward(torch.empty_like(inputs.v), start, inputs)


def differentiated(outputs: int, fused: Callable[..., object], *given: object) -> None:
    """Forward, and the backward from so many of the outputs (0: none)."""
    leaves = [x for x in given if isinstance(x, Tensor) and x.is_floating_point()]
    for x in leaves:
        x.requires_grad_(outputs > 0)
    found = fused(*given)
    found = [found] if isinstance(found, Tensor) else list(found)[:outputs]
    if outputs:
        d_found = [torch.empty_like(y) for y in found]
        torch.autograd.grad(found, leaves, d_found, allow_unused=True)


def slstm_of(size: int, dtype: torch.dtype, kernels: Any = slstm) -> None:
    """Forward and backward, the states saved or not."""
    gates, before = torch.empty(20, 8, 2, 4, size, dtype=dtype), torch.empty(20, 2, 4, size)
    recurrent = torch.empty(2, 4, size, size, dtype=dtype)
    inputs = SLSTMInputs(gates, recurrent, before, None, None)
    for save in (False, True):
        o, final, states = kernels.forward(inputs, save)
    kernels.backward(o.float(), final, inputs, gates.float().flatten(0, 1), states)


CALLS = {
    f"scan, {form}, V {value_size}, K {key_size}, {dtype}": partial(
        scan, scan_inputs(form, value_size, key_size, dtype)
    )
    for form, value_size, key_size, dtype in (
        ("Mamba", 1536, 16, BF16), ("Mamba", 1536, 16, FP32), ("S4", 512, 16, BF16),
        ("S4", 512, 64, BF16),
        ("DFW", 64, 64, BF16), ("DFW", 128, 128, FP32), ("Longhorn", 1536, 16, BF16),
        ("all", 64, 64, FP32), ("all S4", 64, 16, BF16), ("all", 256, 256, BF16),
    )
}  # fmt: skip
CALLS |= {
    f"mesa, C {size}, K {key_size}": partial(solver, size, key_size)
    for size, key_size in ((64, 128), (64, 64), (64, 32), (1, 128), (16, 100))
}
CALLS |= {
    f"sLSTM, D {size}, {dtype}": partial(slstm_of, size, dtype)
    for size, dtype in ((16, FP32), (64, FP32), (64, BF16), (128, FP32), (256, BF16), (256, FP32))
}
CALLS |= {
    f"sLSTM split, D {size}, {dtype}": partial(slstm_of, size, dtype, split_slstm)
    for size, dtype in ((64, FP32), (128, BF16), (200, FP32), (256, BF16), (256, FP32))
}
# All programs at once, as on a GPU.
split_slstm.multiprocessors = lambda device: 132
CALLS |= {
    f"{operator}, C {slots}, K {channels}{', packed' * packed}": partial(
        memory, operator, slots, channels, 0, packed
    )
    for operator, slots, channels, packed in (
        ("TTT", 16, 64, False), ("TTT", 16, 64, True), ("Titans", 16, 32, False),
        ("TTT", 1, 64, False),
        ("Titans", 16, 64, False), ("Titans", 16, 32, True),
    )
}  # fmt: skip
CALLS |= {
    f"{operator}, K {channels}, {f'{inner} inside' if inner else 'streamed'}{', packed' * packed}":
    partial(memory, operator, 16, channels, inner, packed)
    for operator, channels, inner, packed in (
        ("TTT", 64, 256, False), ("TTT", 64, 256, True), ("Titans", 64, 128, False),
        ("TTT", 128, 512, False), ("Titans", 128, 256, True), ("TTT", 128, 0, False),
        ("TTT", 32, 128, False),
    )
}  # fmt: skip
CALLS["Titans, K 128, streamed"] = partial(memory, "Titans", 16, 128, 0, False)
CALLS["scan, signed Mamba, V 1536, K 16"] = partial(
    scan, scan_inputs("Mamba", 1536, 16, BF16)._replace(signed=True)
)


def halves(*shape: int) -> Tensor:
    """Of the layers: in 16 bits."""
    return torch.empty(shape, dtype=BF16)


CHANNELS, TAPS, OFFSETS = halves(2, 4096, 2048), torch.empty(2048, 4), torch.tensor([0, 4096])
ROW, ONE_ROW, VOCAB = halves(5472), halves(2048, 5472), halves(64, 50_000)
HEADS, GATES = halves(1, 256, 16, 128), halves(1, 4096, 16, 128)
STREAMS = tuple(Stream(halves(2, 1, 2048), TAPS, halves(2, 3, 2048), True) for _ in "qkv")
WITHIN = Within((TAPS,) * 3, (halves(64, 3, 2048),) * 3, True)
OWNER, TARGETS_OF_ROWS = torch.zeros(4096, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
# From how many outputs the backward goes, and what is called.
FUSED = {
    "conv": (1, short_conv, CHANNELS, TAPS, halves(2, 3, 2048), None, None, None, True),
    "conv, packed": (
        2, short_conv, CHANNELS[:1], TAPS, halves(1, 3, 2048), OFFSETS, OWNER, None, True
    ),
    "conv, fresh": (1, short_conv, CHANNELS, TAPS, None, None, None, None, True),
    "conv, one token": (
        1, short_conv, CHANNELS[:, :1], TAPS, halves(2, 3, 2048), None, None, None, True
    ),
    "conv, step": (0, convolution_step, STREAMS),
    "norm": (1, gated_norm, HEADS, torch.empty_like(HEADS), torch.empty(128), 1e-5, "silu", False),
    "residual norm": (2, residual_norm, CHANNELS[0], CHANNELS[1], torch.empty(2048), 1e-5),
    "norm made again": (
        0, gated_norm_gradients, GatedNorm(HEADS, HEADS, halves(128), 1e-5, "silu", False), HEADS,
        None, True,
    ),
    "swiglu": (1, swiglu, halves(64, 5472), halves(64, 5472)),
    "swiglu and its products": (
        1, GatedProducts.apply, halves(64, 2048), ONE_ROW.mT.contiguous(), halves(5472, 2048),
        ONE_ROW, 1.0,
    ),
    "one row": (0, one_row, ROW, ONE_ROW, ROW.clone(), halves(2048)),
    "normed row": (
        0, normed_row, halves(16, 192), halves(192), 1e-5, halves(2048, 3072), halves(16, 192),
        "silu", halves(2048),
    ),
    "likeliest": (0, likeliest, VOCAB),
    "decay": (2, log_decay, GATES, torch.empty(16), torch.empty(16, 128), True),
    "strength": (1, write_strength, GATES, 1.0),
    "cross entropy": (1, cross_entropy, VOCAB, TARGETS_OF_ROWS, -100),
}  # fmt: skip
FEW_ROWS = {
    "few rows": (halves(32, 5472), ONE_ROW),
    "few rows, gated": (halves(32, 2048), ONE_ROW.mT.contiguous(), True),
    "few rows, convolved": (halves(32, 2048), halves(9248, 2048), False, WITHIN),
}
FUSED |= {name: (0, few_rows, *of) for name, of in FEW_ROWS.items()}
CALLS |= {f"fused, {name}": partial(differentiated, *of) for name, of in FUSED.items()}


def launches(call: Callable[[], None]) -> list[Launch]:
    with recording() as found:
        call()
    return found


if __name__ == "__main__":
    main(
        calls=lambda capability: (
            (name, partial(launches, x))
            for name, x in CALLS.items()
            # Only Hopper has what these are written in.
            if "few rows" not in name or capability == 90
        )
    )
