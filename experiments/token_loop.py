"""The delta rule as a loop over tokens in C, forward and backward: what chunks are compared with.

    e_t = v_t - S k_t        S <- S + beta_t e_t k_t^T        o_t = scale * S q_t

Compiled and fused, a head's state never leaves the cache: the fastest form that goes token by token
on one core. A loop in Python would lose to anything.
"""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

COMPILERS = ("cc", "gcc", "clang")
# Sums may be taken in any order. Not -ffast-math: loading what that makes has the whole process
# round its smallest numbers to zero.
OPTIONS = (
    "-O3", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno",
    "-shared", "-fPIC",
)  # fmt: skip
SOURCE = Path(__file__).with_suffix(".c")


@cache
def library() -> ctypes.CDLL:
    """The compiled loop; a ValueError says that there is no C compiler, or why it fails."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise ValueError(
            f"the loop over tokens is compiled from C, and none of {', '.join(COMPILERS)} was "
            "found: install a C compiler"
        )
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "loop.so")
        # Some compilers do not know the option, and those do without.
        for native in (("-march=native",), ()):
            command = [compiler, *OPTIONS, *native, str(SOURCE), "-o", str(output)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                return ctypes.CDLL(str(output))
    raise ValueError(f"{compiler} could not compile the loop over tokens: {done.stderr.strip()}")


def forward(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs, and the errors e that the backward pass needs.

    All are float32 on the CPU: q and k [B, T, H, K], v [B, T, H, V], beta [B, T, H].
    """
    o, e = torch.empty_like(v), torch.empty_like(v)
    call("forward", q, v, [q, k, v, beta, o, e])
    return o, e


def backward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, e: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    gradients = tuple(torch.empty_like(x) for x in (q, k, v, beta))
    call("backward", q, v, [q, k, beta, e, grad, *gradients])
    return gradients


def call(name: str, q: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> None:
    for x in tensors:
        if x.dtype != torch.float32 or x.device.type != "cpu" or not x.is_contiguous():
            raise ValueError(f"tensors must be contiguous float32 on the CPU, got {x.dtype}")
    batch, tokens, heads, key_size = q.shape
    sizes = [ctypes.c_long(n) for n in (batch, tokens, heads, key_size, v.shape[3])]
    state = torch.empty(v.shape[3], key_size)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (state, *tensors)]
    getattr(library(), name)(*sizes, ctypes.c_float(key_size**-0.5), *pointers)
