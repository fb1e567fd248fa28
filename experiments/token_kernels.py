"""The delta rule as Triton kernels that go token by token: what chunks are compared with on a GPU.

    e_t = v_t - S k_t        S <- S + beta_t e_t k_t^T        o_t = scale * S q_t

A program keeps BV rows of one head's state in registers. The backward pass goes over the tokens
twice: from the last with the gradient of the state, from the first with the state. What sums over
all rows of a state comes out in parts, one for each program.
"""

# A kernel is written in Triton's language, which has no types.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows of the state in a program: few, so that one warp holds them and there are many programs.
ROWS = 8
OPTIONS = {"num_warps": 1, "num_stages": 3}


@triton.jit
def forward_kernel(
    q, k, v, beta, o, e, scale, T, H, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr
):
    """Outputs and errors of BV rows of one head of one batch row."""
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_k, o_v = tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    b_s = tl.zeros([BV, K], tl.float32)
    for t in range(T):
        row = (i_b * T + t) * H + i_h
        b_q = tl.load(q + row * K + o_k).to(tl.float32)
        b_k = tl.load(k + row * K + o_k).to(tl.float32)
        b_e = tl.load(v + row * V + o_v).to(tl.float32) - tl.sum(b_s * b_k[None, :], axis=1)
        b_s += (tl.load(beta + row).to(tl.float32) * b_e)[:, None] * b_k[None, :]
        tl.store(e + row * V + o_v, b_e)
        b_o = scale * tl.sum(b_s * b_q[None, :], axis=1)
        tl.store(o + row * V + o_v, b_o.to(o.dtype.element_ty))


@triton.jit
def from_last_kernel(
    q, k, beta, e, grad, dk, dv, dbeta, scale, N, T, H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """From the last token back, with the gradient of the state: dv, dbeta and one half of dk."""
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_k, o_v = tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    b_ds = tl.zeros([BV, K], tl.float32)
    for i in range(T):
        row = (i_b * T + (T - 1 - i)) * H + i_h
        part = i_v * N + row
        b_q = tl.load(q + row * K + o_k).to(tl.float32)
        b_k = tl.load(k + row * K + o_k).to(tl.float32)
        b_e = tl.load(e + row * V + o_v)
        b_beta = tl.load(beta + row).to(tl.float32)
        b_do = tl.load(grad + row * V + o_v).to(tl.float32)
        b_ds += (scale * b_do)[:, None] * b_q[None, :]
        b_du = tl.sum(b_ds * b_k[None, :], axis=1)
        tl.store(dbeta + part, tl.sum(b_du * b_e))
        tl.store(dk + part * K + o_k, tl.sum(b_ds * (b_beta * b_e)[:, None], axis=0))
        tl.store(dv + row * V + o_v, (b_beta * b_du).to(dv.dtype.element_ty))
        b_ds -= (b_beta * b_du)[:, None] * b_k[None, :]


@triton.jit
def from_first_kernel(
    k, beta, e, grad, dv, dq, dk, scale, N, T, H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """From the first token on, with the state: dq and the other half of dk."""
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_k, o_v = tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    b_s = tl.zeros([BV, K], tl.float32)
    for t in range(T):
        row = (i_b * T + t) * H + i_h
        part = i_v * N + row
        b_k = tl.load(k + row * K + o_k).to(tl.float32)
        b_u = tl.load(beta + row).to(tl.float32) * tl.load(e + row * V + o_v)
        b_dv = tl.load(dv + row * V + o_v).to(tl.float32)
        b_do = tl.load(grad + row * V + o_v).to(tl.float32)
        tl.store(dk + part * K + o_k, -tl.sum(b_s * b_dv[:, None], axis=0))
        b_s += b_u[:, None] * b_k[None, :]
        tl.store(dq + part * K + o_k, scale * tl.sum(b_s * b_do[:, None], axis=0))


class TokenByToken(torch.autograd.Function):
    """o of q and k [B, T, H, K], K a power of two, v [B, T, H, V], V a multiple of 8, and beta
    [B, T, H]; all are contiguous.
    """

    @staticmethod
    def forward(ctx, q, k, v, beta):
        o, e = torch.empty_like(v), torch.empty_like(v, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, beta, e)
        forward_kernel[grid(v)](
            q, k, v, beta, o, e, q.shape[3] ** -0.5, *q.shape[1:3], **sizes(q, v), **OPTIONS
        )
        return o

    @staticmethod
    def backward(ctx, grad):
        q, k, v, beta, e = ctx.saved_tensors
        parts, more = v.shape[3] // ROWS, (q.shape[3] ** -0.5, beta.numel(), *q.shape[1:3])
        dq, dk, dk_more = q.new_empty(3, parts, *q.shape, dtype=torch.float32).unbind()
        dv, dbeta = torch.empty_like(v), beta.new_empty(parts, *beta.shape, dtype=torch.float32)
        from_last_kernel[grid(v)](
            q, k, beta, e, grad, dk, dv, dbeta, *more, **sizes(q, v), **OPTIONS
        )
        from_first_kernel[grid(v)](
            k, beta, e, grad, dv, dq, dk_more, *more, **sizes(q, v), **OPTIONS
        )
        dk_all = dk.sum(0) + dk_more.sum(0)
        return dq.sum(0).to(q.dtype), dk_all.to(k.dtype), dv, dbeta.sum(0).to(beta.dtype)


def token_by_token(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    o: Tensor = TokenByToken.apply(q, k, v, beta)
    return o


def sizes(q: Tensor, v: Tensor) -> dict[str, int]:
    return {"K": q.shape[3], "V": v.shape[3], "BV": ROWS}


def grid(v: Tensor) -> tuple[int, int, int]:
    batch, _, heads, value_size = v.shape
    return value_size // ROWS, heads, batch
