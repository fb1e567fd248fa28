"""The pass that finds what segments end with: its tiles, and what it leaves."""

import triton
import triton.language as tl

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton.plan import Plan, stretches
from deltarule.ops.delta_rule.triton.tiles import state_tile


def ends_configuration(config: dict[str, int]) -> dict[str, int]:
    """The pass that finds the segments' ends takes tiles half as large as the one after it.

    Without outputs they need so little that several programs share a multiprocessor, and one
    computes while another waits; that takes the place of a pipeline stage.
    """
    if config["BV"] < 128:
        return config
    halves = {name: config[name] // 2 for name in ("BV", "num_warps")}
    return config | halves | {"STAGES": max(config["STAGES"] - 1, 1)}


def transitions_shape(inputs: Inputs, plan: Plan) -> tuple[int, ...]:
    """The shape of the segments' ends: V rows of S, then A (without an erase: its diagonal)."""
    _, heads, value_size, key_size = inputs.state_shape
    rows = value_size + (1 if inputs.erase == "none" else key_size)
    return stretches(inputs, plan), heads, rows, key_size


@triton.jit
def store_ends(ends, i_s, i_h, i_v, i_a, o_k, b_s, b_through, S: tl.constexpr):
    """Rows of S, a tile of A (i_a >= 0), or its diagonal, of ends [slots, HV, V + K or 1, K]."""
    ROWS: tl.constexpr = S.V + 1 if S.ERASE == "none" else S.V + S.K
    o_end = tl.where(i_a < 0, i_v * S.BV, S.V + i_a * S.BV) + tl.arange(0, S.BV)
    m_end, m_k = o_end < tl.where(i_a < 0, S.V, ROWS), (o_k < S.K)[None, :]
    p_end = state_tile(ends, i_s, i_h, o_end, o_k, S.HV, S.K, ROWS)
    tl.store(p_end, b_s, mask=m_end[:, None] & m_k)
    if S.ERASE == "none":
        p_end = state_tile(ends, i_s, i_h, S.V + tl.arange(0, 1), o_k, S.HV, S.K, ROWS)
        tl.store(p_end, b_through, mask=(o_k < tl.where(i_v == 0, S.K, 0))[None, :])
