"""Compile the kernels beside the recurrence for GPUs that need not be here; print JSON.

A program of its own: Triton's interpreter, in which the tests run, cannot be left again.
"""

import argparse
import itertools
import json
import sys

import triton
from ahead import resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deltarule.ops.fused import (
    convolution_step_triton,
    cross_entropy_triton,
    gates_triton,
    likeliest_triton,
    norms_triton,
    one_row_triton,
    short_conv_triton,
    swiglu_triton,
)

CONV = {
    "W": 4, "C": 128, "BD": 128, "PADDED": False, "counts": None, "ACTIVATED": True,
}  # fmt: skip
FORWARD = dict(zip(("BG", "RUN"), short_conv_triton.TILE, strict=True))
BACKWARD = dict(zip(("BG", "RUN"), short_conv_triton.BACKWARD_TILE, strict=True))
ROWS = {"cu_seqlens": None, "sequence": None, "PACKED": False}
TRAINING = {"d_final": None, "FINAL": False}
NORM = {"H": 16, "V": 128, "BV": 128, "ACTIVATION": "silu"}
SUM = {"V": 2048, "BV": 2048}
GATE = {"C": 2048, "K": 128, "BC": 256, "BR": 4}
ROW = {"BO": one_row_triton.OF_PROGRAM, "AHEAD": one_row_triton.AHEAD, "ADDED": True}
SWIGLU = {"D": 5472, "BLOCK": swiglu_triton.BLOCK}
KERNELS = {
    "conv": (short_conv_triton.short_conv_kernel, CONV | FORWARD | ROWS | {"UNIT_NORM": False}),
    "conv, packed": (
        short_conv_triton.short_conv_kernel, CONV | FORWARD | {"PACKED": True, "UNIT_NORM": True},
    ),
    "conv, one token": (
        short_conv_triton.short_conv_kernel,
        CONV | ROWS | {"UNIT_NORM": False, "BG": 1, "RUN": 1, "T": 1, "blocks": 1},
    ),
    "conv backward": (
        short_conv_triton.short_conv_backward_kernel,
        CONV | BACKWARD | ROWS | TRAINING | {"UNIT_NORM": False},
    ),
    "conv backward, packed": (
        short_conv_triton.short_conv_backward_kernel,
        CONV | BACKWARD | TRAINING | {"PACKED": True, "UNIT_NORM": False},
    ),
    "history gradient": (
        short_conv_triton.history_gradient_kernel,
        CONV | BACKWARD | {"PACKED": True, "UNIT_NORM": False, "FINAL": True},
    ),
    "norm": (norms_triton.gated_norm_kernel, NORM | {"BR": 16}),
    "norm backward": (norms_triton.gated_norm_backward_kernel, NORM | {"BR": 8, "TILES": 8}),
    "residual norm": (norms_triton.residual_norm_kernel, SUM),
    "residual norm backward": (
        norms_triton.residual_norm_backward_kernel,
        SUM | {"ROWS": norms_triton.ROWS, "SUM": True},
    ),
    "swiglu": (swiglu_triton.swiglu_kernel, SWIGLU),
    "swiglu backward": (
        swiglu_triton.swiglu_backward_kernel, SWIGLU | {"PRODUCT": True},
    ),
    "one row": (
        one_row_triton.one_row_kernel,
        ROW | {"I": 5472, "BI": one_row_triton.CHANNELS, "GATED": True},
    ),
    "normed row": (
        one_row_triton.normed_row_kernel,
        ROW | {"H": 16, "V": 192, "BH": 16, "BV": 256, "ACTIVATION": "silu"},
    ),
    "convolution step": (
        convolution_step_triton.convolution_step_kernel,
        {"T": 1, "W": 4, "C": 128} | {f"ACTIVATED_{i}": True for i in range(3)},
    ),
    "likeliest": (likeliest_triton.likeliest_kernel, {"BV": likeliest_triton.BLOCK}),
    "decay": (gates_triton.log_decay_kernel, GATE | {"STEP": True, "BR": 16}),
    "decay backward": (
        gates_triton.log_decay_backward_kernel, GATE | {"STEP": True, "DECAY": True, "TILES": 8},
    ),
    "strength": (gates_triton.write_strength_kernel, GATE | {"BACKWARD": True}),
    "cross entropy": (
        cross_entropy_triton.cross_entropy_kernel, {"BV": cross_entropy_triton.BLOCK},
    ),
    "cross entropy backward": (
        cross_entropy_triton.cross_entropy_backward_kernel, {"BV": cross_entropy_triton.BLOCK},
    ),
}  # fmt: skip
HALF = (
    "x", "y", "d_y", "d_x", "history", "final", "d_final", "d_history", "gate", "d_gate", "logits",
    "d_logits", "residual", "up", "h", "d_h", "d_up", "s", "z", "d_s", "d_z",
)  # fmt: skip
FLOAT = (
    "weight", "d_taps", "d_weight", "A_log", "dt_bias", "log_decay", "dt", "d_log_decay", "d_dt",
    "d_A_log", "d_dt_bias", "scale", "d_beta", "out", "losses", "lse", "d_losses",
)  # fmt: skip
TYPES = (
    dict.fromkeys(HALF, "*bf16") | dict.fromkeys(FLOAT, "*fp32")
    | {f"{x}_{i}": "*bf16" for x in "xwhy" for i in range(3)}
    | dict.fromkeys(("tokens", "cu_seqlens", "sequence", "counts", "targets"), "*i64")
    | dict.fromkeys(("eps", "beta_max"), "fp32")
)  # fmt: skip
# Multiples of 16, as whole channels make them: what wide loads need.
ALIGNED = ("D", "V", "s_b", "s_t", "s_dy_b", "s_dy_t", "s_row", "s_out", "elements")
ALIGNED += ("s_x", "s_y", "s_ds", "s_dz", "s_gate", "s_up", "s_out")
ALIGNED += tuple(f"s_{x}_{axis}" for x in ("dy", "x", "gate") for axis in "mh")


def compile_kernel(name: str, capability: int) -> dict[str, int]:
    """Registers, spills and shared memory."""
    kernel, constants = KERNELS[name]
    constants = constants | {"CHAINED": False}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    warps = 8 if "entropy" in name else 4
    options = {"num_stages": 1, "enable_fp_fusion": True, "num_warps": warps}
    module = sys.modules[kernel.__module__]
    if module in (short_conv_triton, one_row_triton, likeliest_triton):
        options = module.OPTIONS
    types = TYPES | {"weight": "*bf16"} if module is one_row_triton else TYPES
    signature = {
        x: "constexpr" if x in constants else types.get(x, "i32") for x in kernel.arg_names
    }
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, x in enumerate(kernel.arg_names)
        if signature[x] != "constexpr" and (signature[x].startswith("*") or x in ALIGNED)
    }
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return resources(compiled.asm["cubin"])


def main() -> None:
    """Print what all kernels take on the targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", type=int, nargs="+", required=True)
    cases = itertools.product(KERNELS, parser.parse_args().targets)
    print(json.dumps([[name, target, compile_kernel(name, target)] for name, target in cases]))


if __name__ == "__main__":
    main()
