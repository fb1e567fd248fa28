"""What sharding, contexts and heads cost: training steps of one model, alone and on several GPUs.

    torchrun --nproc-per-node 2 -m bench.several_gpus --out several_h200.json

Steps follow each other as in training: the host waits for none. Each process of "alone" trains by
itself; the others share rows, tokens or heads. On CPUs the sizes are tiny and the times mean
nothing.
"""

import argparse
import functools
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bench import results, timing
from bench.travel import WAYS, counted
from deltarule import make_context
from deltarule.cli import leave
from deltarule.models import CausalLM, ModelConfig
from deltarule.parallel import MeshOptions, World
from deltarule.train.optimizer import OptimizerOptions, make_optimizer
from deltarule.train.spread import Spread
from deltarule.train.step import TrainingStep

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# 1.5 billion parameters.
LARGE = {"vocab_size": 32_000, "hidden_size": 2048, "num_layers": 26, "num_heads": 16}
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2}
HEAD, TOKENS, ROWS = (128, 4096, 8) if CUDA else (8, 16, 2)
SIZES: dict[str, Any] = LARGE if CUDA else SMALL
CONFIG = ModelConfig(**SIZES, head_k_dim=HEAD, head_v_dim=HEAD, layer_types="gated_deltanet")


class Case(NamedTuple):
    """Who trains on what, and how the weights and gradients of blocks travel."""

    who: str = "shards"
    # All tokens of a process in one row, which the processes share.
    one_row: bool = False
    # Gathered weights stay from a block's forward to its backward.
    kept: bool = True
    # None: as the library does it, and before all others, which the model keeps.
    way: str | None = None


CASES = {
    "alone": Case("alone"),
    "alone, one row": Case("alone", one_row=True),
    "sharded, weights kept": Case(),
    "context and shards, one row, weights kept": Case(one_row=True),
    "sharded": Case(kept=False),
    "context and shards, one row": Case(one_row=True, kept=False),
    "sharded, gradients in float32": Case(way="gradients in float32"),
    # After it the weights are different on every process.
    "sharded, nothing sent": Case(way="nothing sent"),
    "one row, nothing sent": Case(one_row=True, way="nothing sent"),
    "heads": Case("heads"),
}


class Trained(NamedTuple):
    """A model, its optimizer, and the processes that share it."""

    world: World
    spread: Spread
    optimizer: torch.optim.Optimizer
    # Processes that share a row, on a communicator that nothing else waits for.
    sharing: dist.ProcessGroup


def make(who: str) -> Trained:
    """The model with the same weights everywhere, alone or spread, for all of its cases."""
    world = World(torch.device(DEVICE), MeshOptions(keep_gathered="yes"))
    if who == "heads":
        world = World(torch.device(DEVICE), MeshOptions(tensor=world.size))
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = CausalLM(CONFIG)
    together = world.size if who == "shards" else 1
    spread = Spread(model, None if who == "alone" else world, bfloat16=True, count=together)
    return Trained(world, spread, make_optimizer(model, OptimizerOptions()), dist.new_group())


def training(case: Case, trained: Trained, rows: int, steps: int) -> dict[str, Any]:
    """Steps of AdamW on float32 weights under autocast, of so many rows for each process."""
    world, spread, optimizer, sharing = trained
    ways, tokens, where = world.size, TOKENS, None
    if case.one_row:
        rows, tokens = 1, rows * TOKENS
        if case.who == "shards":
            tokens *= ways
            where = make_context(tokens, group=sharing)
    if case.who == "shards":
        travel(spread.model, case)
    seed = 0 if where is not None or case.who == "heads" else world.rank
    generator = torch.Generator(DEVICE).manual_seed(seed)
    batch = torch.randint(CONFIG.vocab_size, (2, rows, tokens), device=DEVICE, generator=generator)

    def loss(batch: Tensor) -> Tensor:
        """The mean over the tokens here."""
        tokens, targets = (x if where is None else where.part(x) for x in batch)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            x, _ = spread.model.hidden(tokens, context=where)
            return spread.model.loss(x, targets)

    step = TrainingStep(loss, optimizer, clip=1.0, cuda_graphs=False, spread=spread)
    run = functools.partial(step, [batch])
    with counted() as sent:
        first = float(run()[0])
    run()
    timing.synchronize()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    times = torch.tensor(timing.event_times([run], steps))
    dist.all_reduce(times, dist.ReduceOp.MAX)
    began = time.perf_counter()
    report = run()
    host = time.perf_counter() - began
    ms = statistics.median(times.tolist())
    shared = ways if where is not None or case.who == "heads" else 1
    return {
        "rows": rows, "tokens": tokens,
        "parameters": sum(p.numel() for p in spread.model.parameters()),
        "losses": [round(first, 5), round(float(report[0]), 5)], "step_ms": round(ms, 3),
        "each_ms": [round(x, 1) for x in times.tolist()], "host_ms": round(1e3 * host, 1),
        "tokens_per_second_each": round(rows * tokens / shared / ms * 1e3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if CUDA else None,
        "sent_mb": sent,
    }  # fmt: skip


def travel(model: CausalLM, case: Case) -> None:
    """Let a sharded model's weights and gradients travel in a case's way."""
    blocks: list[Any] = list(model.blocks)
    group = dist.group.WORLD
    assert group is not None
    for block in blocks:
        block.set_reshard_after_forward(not case.kept)
        if case.way is not None:
            gather, sums = WAYS[case.way](group)
            block.set_custom_all_gather(gather)
            block.set_custom_reduce_scatter(sums)


def found(names: Sequence[str], rows: int, steps: int) -> Iterator[results.Found]:
    asked = [(name, CASES[name]) for name in CASES if name in names]
    for who, cases in itertools.groupby(asked, key=lambda item: item[1].who):
        # One model at a time: two do not fit.
        trained = make(who)
        for name, case in cases:
            facts = {"kind": "several_gpus", "case": name, **case._asdict()}
            yield "deltarule", facts, training(case, trained, rows, steps)
        del trained
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()


def main() -> None:
    """Run the cases one after the other; the first process files what is known after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rows", type=int, default=ROWS, help="of 4,096 tokens, a GPU and step")
    parser.add_argument("--steps", type=int, default=5, help="that are timed")
    given = parser.parse_args()
    size = int(os.environ["WORLD_SIZE"])
    program = f"torchrun --nproc-per-node {size} -m bench.several_gpus"
    report = results.new_report(sys.argv[1:], program)
    report |= {"processes": size, "config": json.loads(CONFIG.to_json())}
    figures = found(given.cases, given.rows, given.steps)
    if os.environ["RANK"] == "0":
        results.file_each(report, figures, given.out)
    else:
        list(figures)
    leave()


if __name__ == "__main__":
    main()
