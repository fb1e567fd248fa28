"""The conjugate gradients of `mesa`: all iterations of some tokens of a chunk in one program.

    A_i y = start_i H y + sum_j weights_ij (k_j . y) k_j + regularizer * y        A_i x_i = b_i

for the tokens i of a chunk, with its keys k_j and the covariance H at its start. Tokens are
independent of each other: a program takes BR of them through all iterations, with x, the residual r
and the direction p in registers, where plain PyTorch would move each through memory a dozen times.

A product reads the tiles of both its operands from memory, BS channels at a time. The rows p and
the pair scores are written there first, and found again in the cache: a loop whose operands do not
change with the round would have them fetched once, before it, and H with its two parts of tf32
is more than a multiprocessor holds. It also keeps the rule of gradients.py: an operand of a product
in a loop is nothing else.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltarule.ops.mesa.torch import Systems
from deltarule.ops.runtime.named import launch

# Tokens of a program, and channels that a round of a product goes through.
ROWS, STEP = 32, 32
# The least positive normal number: divisors are at least this.
TINY = tl.constexpr(2.0**-126)
# float32 as the sum of three products in tf32: one would lose what the iterations gain.
PRECISION = tl.constexpr("tf32x3")
# In a loop with products nothing is pipelined.
OPTIONS = {"num_stages": 1}


@triton.jit
def product(b_sum, p_x, m_x, p_y, s_y, m_y, SIZE: tl.constexpr, BS: tl.constexpr):
    """b_sum + x y over SIZE channels: rows of x at p_x, columns of y at p_y with steps s_y."""
    for i_s in range(0, SIZE, BS):
        o_s = i_s + tl.arange(0, BS)
        m_s = o_s < SIZE
        b_x = tl.load(p_x + o_s[None, :], mask=m_x[:, None] & m_s[None, :], other=0.0)
        b_y = tl.load(p_y + o_s[:, None] * s_y, mask=m_y[None, :] & m_s[:, None], other=0.0)
        b_sum = tl.dot(b_x, b_y, acc=b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit(do_not_specialize=["iterations"])
def conjugate_gradients_kernel(
    k, weights, start, H, regularizer, b, x, directions, scores, iterations,
    HV: tl.constexpr, C: tl.constexpr, K: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    BR: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """BR rows of one chunk of one head; p and the scores go through `directions` and `scores`."""
    i_p = tl.program_id(0).to(tl.int64)
    o_r = tl.program_id(1) * BR + tl.arange(0, BR)
    o_c, o_k = tl.arange(0, BC), tl.arange(0, BK)
    m_r, m_c, m_k = o_r < C, o_c < C, o_k < K
    row = i_p * C + o_r[:, None]
    m_x, m_w = m_r[:, None] & m_k[None, :], m_r[:, None] & m_c[None, :]
    b_start = tl.load(start + i_p * C + o_r, mask=m_r, other=0.0)[:, None]
    b_ridge = tl.load(regularizer + i_p % HV * K + o_k, mask=m_k, other=0.0)[None, :]
    b_w = tl.load(weights + row * C + o_c[None, :], mask=m_w, other=0.0)
    b_r = tl.load(b + row * K + o_k[None, :], mask=m_x, other=0.0)
    b_p, b_x = b_r, tl.zeros([BR, BK], tl.float32)
    b_size = tl.sum(b_r * b_r, axis=1, keep_dims=True)
    k += i_p * C * K
    H += i_p * K * K
    for _ in range(iterations):
        # All have read what is overwritten; then all see what was written.
        tl.debug_barrier()
        tl.store(directions + row * K + o_k[None, :], b_p, mask=m_x)
        tl.debug_barrier()
        b_s = tl.zeros([BR, BC], tl.float32)
        b_s = product(b_s, directions + row * K, m_r, k + o_c[None, :] * K, 1, m_c, K, BS)
        tl.store(scores + row * C + o_c[None, :], b_s * b_w, mask=m_w)
        b_i = tl.zeros([BR, BK], tl.float32)
        b_i = product(b_i, directions + row * K, m_r, H + o_k[None, :] * K, 1, m_k, K, BS)
        tl.debug_barrier()
        b_i = product(b_i * b_start, scores + row * C, m_r, k + o_k[None, :], K, m_k, C, BS)
        b_i += b_ridge * b_p
        b_step = b_size / tl.maximum(tl.sum(b_p * b_i, axis=1, keep_dims=True), TINY)
        b_x += b_step * b_p
        b_r -= b_step * b_i
        b_before = tl.maximum(b_size, TINY)
        b_size = tl.sum(b_r * b_r, axis=1, keep_dims=True)
        b_p = b_r + b_size / b_before * b_p
    tl.store(x + row * K + o_k[None, :], b_x, mask=m_x)


def conjugate_gradients(given: Systems, iterations: int) -> Tensor:
    tensors = zip(given._fields[:6], given[:6], strict=True)
    values: dict[str, Any] = {name: y.contiguous() for name, y in tensors}
    b, weights = values["b"], values["weights"]
    x = torch.empty_like(b)
    if b.numel() == 0:
        return x
    heads, size, channels = b.shape[-3:]
    block_c, block_k = (max(triton.next_power_of_2(n), 16) for n in (size, channels))
    rows = min(ROWS, block_c)
    values |= {"iterations": iterations, "x": x}
    values |= {"directions": torch.empty_like(b), "scores": torch.empty_like(weights)}
    values |= {"HV": heads, "C": size, "K": channels}
    values |= {"BC": block_c, "BK": block_k, "BR": rows, **OPTIONS}
    values |= {"BS": min(STEP, block_c, max(block_k // 2, 16))}
    values["num_warps"] = 8 if block_k > 64 else 4
    grid = b.shape[:-2].numel(), triton.cdiv(size, rows), 1
    launch(conjugate_gradients_kernel, grid, values)
    return x
