"""Compile the step with logits in its gates' places, and on pools, for GPUs that need not be here.

A program of its own, that prints JSON lines: Triton's interpreter cannot be left again.
"""

import argparse
import json
from collections.abc import Iterator

import torch
from ahead import Launch, compiled, recording
from compile_ahead import TARGETS, Call, inputs_of

from deltarule.ops.delta_rule.gate_logits import GateMaps, Step
from deltarule.ops.delta_rule.triton.step import recurrent_step
from deltarule.ops.serving.pool_triton import move

CALLS = [
    *(Call("tied", decay, step=True) for decay in ("head", "channel")),
    Call("tied", "channel", n_steps=2, step=True), Call("free", "channel", step=True),
]  # fmt: skip


def launches(call: Call) -> Iterator[Launch]:
    """The launches with logits and states in two dtypes each."""
    inputs = inputs_of(call)
    pool, slots = inputs.initial_state.half(), torch.empty(1, 4, dtype=torch.int32)
    sizes = inputs.log_decay.shape[2:]
    beta_max = None if inputs.beta is None else 1.0
    maps = GateMaps(torch.empty(sizes[0]), torch.empty(sizes), beta_max)
    for logits, state in ((inputs.q.dtype, torch.float32), (torch.float32, torch.bfloat16)):
        beta = None if inputs.beta is None else inputs.beta.to(logits)
        given = inputs._replace(beta=beta, log_decay=inputs.log_decay.to(logits))
        with recording() as found:
            recurrent_step(Step(given, maps, inputs.initial_state.to(state)))
        yield from found
    packed = inputs._replace(cu_seqlens=torch.empty(2, dtype=torch.int32))
    maps, out = maps._replace(lower_bound=-5.0), torch.empty_like(inputs.v)
    with recording() as found:
        recurrent_step(Step(packed, maps, pool, slots, 0, None, slots[:, 0], out))
        for write in (False, True):
            move(pool, inputs.initial_state, slots[:, 0], 0, write)
    yield from found


def main() -> None:
    """Print one JSON object a line for each launch and target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", type=int, nargs="+", default=TARGETS)
    for target in parser.parse_args().targets:
        for call in CALLS:
            for launch in launches(call):
                found = {"target": target, "call": str(call)}
                found["threads"] = 32 * launch.options["num_warps"]
                print(json.dumps(found | compiled(launch, target)._asdict()), flush=True)


if __name__ == "__main__":
    main()
