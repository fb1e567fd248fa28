"""The gradients through the norms of q and k, where no kernel before had whole rows of them."""

import triton
import triton.language as tl

from deltarule.ops.delta_rule.triton.plan import Call, blocks
from deltarule.ops.delta_rule.triton.tiles import inverse_norm, unit_norm_backward

# Rows of q or k that a program takes.
NORM_ROWS = 32


@triton.jit(do_not_specialize=["rows"])
def unit_norm_gradients_kernel(x, d_x, rows, S: tl.constexpr):
    """Gradients by unit q or k, rows of K channels, to those by q or k, in place."""
    o_r = tl.program_id(0).to(tl.int64) * S.ROWS + tl.arange(0, S.ROWS)
    o_k = tl.arange(0, S.BK)
    o_x, m_x = o_r[:, None] * S.K + o_k[None, :], (o_r < rows)[:, None] & (o_k < S.K)[None, :]
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_y = tl.load(d_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_y = unit_norm_backward(b_x, inverse_norm(b_x), b_y)
    tl.store(d_x + o_x, b_y.to(d_x.dtype.element_ty), mask=m_x)


def through_norm(call: Call) -> None:
    options = {"ROWS": NORM_ROWS, "num_warps": 4, "num_stages": 1}
    for name in ("q", "k"):
        rows = call[name].numel() // call.plan.sizes["K"]
        given = {"x": call[name], "d_x": call[f"d_{name}"], "rows": rows}
        call.launch(
            unit_norm_gradients_kernel, (blocks(rows, NORM_ROWS), 1, 1), {**given, **options}
        )
