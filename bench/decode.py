"""`python -m bench.decode`: one decoding step on a GPU, beside the time its bytes take.

A step reads and writes every state once: 2 * B * HV * V * K numbers. The floor is their bytes over
the bandwidth of a large copy, measured in the same run. Three steps are timed: one whose gates are
there, one that makes them of logits itself, and one after the two kernels that make them.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import deltarule
from bench import results
from bench.timing import copy_bandwidth, graph_ms
from deltarule.ops.fused import gates

HEADS, VALUE_HEADS, CHANNELS = 16, 32, 128
BATCHES = (1, 8, 32, 128, 256)
REPEATS = 30
# States are rotated so that none is found in the cache.
ROTATED_BYTES = 512 * 2**20

# Write strength and decay, or the logits of both.
Gates = tuple[Tensor | deltarule.BetaLogits, Tensor | deltarule.DecayLogits]


def found(report: results.Row) -> Iterator[results.Found]:
    bandwidth = copy_bandwidth()
    report["ceilings"] = {"copy_TB_s": bandwidth / 1e12}
    for dtype in (torch.float32, torch.bfloat16):
        for batch in BATCHES:
            size = batch * VALUE_HEADS * CHANNELS**2 * dtype.itemsize
            figures = step_times(batch, dtype, size) | {"floor_us": 2 * size / bandwidth * 1e6}
            yield "deltarule", {"kind": "step", "state": str(dtype), "B": batch}, figures


def step_times(batch: int, dtype: torch.dtype, size: int) -> dict[str, float]:
    """Median microseconds of `recurrent_step` for a Gated DeltaNet layer, by where its gates are.

    us: Made before. logits_us: Made of logits in the step. maps_us: Made by kernels of their own.
    """
    q, k = torch.randn(2, batch, 1, HEADS, CHANNELS, device="cuda").bfloat16().unbind()
    v = torch.randn(batch, 1, VALUE_HEADS, CHANNELS, device="cuda").bfloat16()
    beta, decay = torch.randn(2, batch, 1, VALUE_HEADS, device="cuda").bfloat16().unbind()
    A_log, dt_bias = torch.randn(2, VALUE_HEADS, device="cuda").unbind()
    shape = (batch, VALUE_HEADS, CHANNELS, CHANNELS)
    count = min(max(ROTATED_BYTES // size, 1), 64)
    states = [torch.randn(shape, device="cuda").to(dtype) for _ in range(count)]

    def maps() -> Gates:
        return gates.write_strength(beta, 1.0), gates.log_decay(decay, A_log, dt_bias, False)[0]

    def step(gates_of: Callable[[], Gates], state: Tensor) -> Tensor:
        strength, log_decay = gates_of()
        return deltarule.recurrent_step(
            q, k, v, beta=strength, log_decay=log_decay, normalize_qk=True, state=state
        )

    made = maps()
    logits = deltarule.BetaLogits(beta), deltarule.DecayLogits(decay, A_log, dt_bias)
    ways: dict[str, Callable[[], Gates]] = {
        "us": lambda: made,
        "logits_us": lambda: logits,
        "maps_us": maps,
    }
    return {
        name: 1e3 * graph_ms([partial(step, way, state) for state in states], REPEATS)
        for name, way in ways.items()
    }


if __name__ == "__main__":
    results.run_program("bench.decode", __doc__, found)
