"""`python -m bench.decode`: one decoding step on a GPU, beside the time its bytes take.

A step reads and writes every state once. Three steps are timed: one whose gates are there, one that
makes them of logits itself, and one after the two kernels that make them.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

import deltarule
from bench.sides import Case, run_cases
from deltarule.ops.fused import gates

HEADS, VALUE_HEADS, CHANNELS = 16, 32, 128
BATCHES = (1, 8, 32, 128, 256)
# States are rotated so that none is found in the cache.
ROTATED_BYTES = 512 * 2**20

# Write strength and decay, or the logits of both.
Gates = tuple[Tensor | deltarule.BetaLogits, Tensor | deltarule.DecayLogits]


def step(batch: int, dtype: torch.dtype, device: str = "cuda") -> Case:
    """`recurrent_step` of a Gated DeltaNet layer, by where its gates are made."""
    q, k = torch.randn(2, batch, 1, HEADS, CHANNELS, device=device).bfloat16().unbind()
    v = torch.randn(batch, 1, VALUE_HEADS, CHANNELS, device=device).bfloat16()
    beta, decay = torch.randn(2, batch, 1, VALUE_HEADS, device=device).bfloat16().unbind()
    A_log, dt_bias = torch.randn(2, VALUE_HEADS, device=device).unbind()
    shape = (batch, VALUE_HEADS, CHANNELS, CHANNELS)
    size = batch * VALUE_HEADS * CHANNELS**2 * dtype.itemsize
    count = min(max(ROTATED_BYTES // size, 1), 64)
    states = [torch.randn(shape, device=device).to(dtype) for _ in range(count)]

    def maps() -> Gates:
        return gates.write_strength(beta, 1.0), gates.log_decay(decay, A_log, dt_bias, False)[0]

    def run(
        gates_of: Callable[[], Gates], in_turn: Iterator[Tensor], x: Mapping[str, Tensor]
    ) -> Tensor:
        strength, log_decay = gates_of()
        return deltarule.recurrent_step(
            x["q"], x["k"], x["v"], beta=strength, log_decay=log_decay, normalize_qk=True,
            state=next(in_turn),
        )  # fmt: skip

    made = maps()
    logits = deltarule.BetaLogits(beta), deltarule.DecayLogits(decay, A_log, dt_bias)
    ways: dict[str, Callable[[], Gates]] = {
        "made before": lambda: made, "of logits in the step": lambda: logits, "by kernels": maps,
    }  # fmt: skip
    sides = {name: partial(run, way, itertools.cycle(states)) for name, way in ways.items()}
    inputs = {"q": q, "k": k, "v": v}
    return Case(inputs, sides, more_bytes=(2 * size, 0), backward=False, turns=count)


CASES = {
    f"{batch} rows, states in {str(dtype).removeprefix('torch.')}": partial(step, batch, dtype)
    for dtype in (torch.float32, torch.bfloat16)
    for batch in BATCHES
}

if __name__ == "__main__":
    run_cases("bench.decode", __doc__, "step", CASES)
