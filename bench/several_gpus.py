"""What sharding, contexts and heads cost: training steps of one model, alone and on several GPUs.

    torchrun --nproc-per-node 2 -m bench.several_gpus --out several_h200.json

Each process of "alone" trains by itself; the others share rows, tokens or heads. On CPUs the sizes
are tiny and the times mean nothing.
"""

import argparse
import dataclasses
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bench import timing
from deltarule import make_context
from deltarule.cli import leave
from deltarule.models import CausalLM, ModelConfig
from deltarule.ops.context import Context
from deltarule.parallel import MeshOptions, World
from deltarule.parallel.sharding import clip_sharded
from deltarule.train.optimizer import OptimizerOptions, make_optimizer
from deltarule.train.spread import Spread

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# 1.5 billion parameters.
LARGE = ModelConfig(
    vocab_size=32_000,
    hidden_size=2048,
    num_layers=26,
    num_heads=16,
    head_k_dim=128,
    head_v_dim=128,
    layer_types="gated_deltanet",
)
SMALL = dataclasses.replace(
    LARGE,
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    head_k_dim=8,
    head_v_dim=8,
    layer_types="gated_deltanet",
)
CONFIG = LARGE if CUDA else SMALL
TOKENS, ROWS = (4096, 8) if CUDA else (16, 2)


@functools.cache
def world_of(context: int, tensor: int, keep: bool) -> World:
    """The processes as they share tokens and heads."""
    asked: Literal["yes", "no"] = "yes" if keep else "no"
    options = MeshOptions(context=context, tensor=tensor, keep_gathered=asked)
    return World(torch.device(DEVICE), options)


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Median of the slowest process's times, between barriers."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        timing.synchronize()
        began = time.perf_counter()
        run()
        timing.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(statistics.median(slowest.tolist()), 3)


def training(
    rows: int,
    tokens: int,
    *,
    alone: bool = False,
    context: int = 1,
    tensor: int = 1,
    keep: bool = False,
) -> dict[str, Any]:
    """Steps of AdamW on float32 weights under autocast, of so many rows for each process."""
    world = world_of(context, tensor, keep)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = CausalLM(CONFIG)
    spread = Spread(model, None if alone else world, bfloat16=True)
    optimizer = make_optimizer(model, OptimizerOptions())
    where = None
    if context > 1:
        assert world.mesh is not None
        where = make_context(tokens, group=world.mesh["context"].get_group())
    seed = 0 if context > 1 or tensor > 1 else world.rank
    generator = torch.Generator(DEVICE).manual_seed(seed)
    batch = torch.randint(CONFIG.vocab_size, (2, rows, tokens), device=DEVICE, generator=generator)
    step = functools.partial(update, spread, optimizer, batch, where)
    losses = [step() for _ in range(2)]
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    ms = milliseconds(step, 4)
    peak = round(torch.cuda.max_memory_allocated() / 2**30, 1) if CUDA else None
    shared = context * tensor
    return {
        "rows": rows,
        "tokens": tokens,
        "context": context,
        "tensor": tensor,
        "alone": alone,
        "weights_kept": keep,
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": losses,
        "step_ms": ms,
        "tokens_per_second_each": round(rows * tokens / shared / ms * 1e3),
        "peak_gib": peak,
    }


def update(
    spread: Spread, optimizer: torch.optim.Optimizer, batch: Tensor, where: Context | None
) -> float:
    """One optimizer step; the loss before it."""
    model, (tokens, targets) = spread.model, batch.unbind()
    share = 1.0
    if where is not None:
        tokens, targets = where.part(tokens), where.part(targets)
    if spread.plan is not None and spread.plan.data is not None:
        share = 1 / spread.plan.data.size()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        x, _ = model.hidden(tokens, context=where)
        loss = model.loss(x, targets) * share
    loss.backward()
    figures = spread.total(loss.detach().reshape(1).clone())
    spread.norm()
    clip_sharded(list(model.parameters()), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return round(float(figures), 5)


def links() -> dict[str, Any]:
    found = {}
    for mib in (0.03, 2, 64, 512) if CUDA else (0.01,):
        x = torch.zeros(int(mib * 2**18), device=DEVICE)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        found[f"{mib} MiB"] = {
            "all_gather": milliseconds(functools.partial(dist.all_gather, parts, x), 5),
            "all_reduce": milliseconds(functools.partial(dist.all_reduce, x), 5),
        }
    return found


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "links": links,
    "alone": lambda: training(ROWS, TOKENS, alone=True),
    "sharded": lambda: training(ROWS, TOKENS),
    "sharded, weights kept": lambda: training(ROWS, TOKENS, keep=True),
    "alone, one row": lambda: training(1, ROWS * TOKENS, alone=True),
    "context and shards, one row": lambda: training(
        1, ROWS * TOKENS * dist.get_world_size(), context=dist.get_world_size()
    ),
    "context and shards, one row, weights kept": lambda: training(
        1, ROWS * TOKENS * dist.get_world_size(), context=dist.get_world_size(), keep=True
    ),
    "heads": lambda: training(ROWS, TOKENS, tensor=dist.get_world_size()),
}


def main() -> None:
    """Run the cases one after the other, and write what is known after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--command", default="")
    arguments = parser.parse_args()
    world = world_of(1, 1, False)
    name = torch.cuda.get_device_name() if CUDA else "CPU"
    facts: dict[str, Any] = {
        "machine": f"{world.size} x {name}",
        "torch": torch.__version__,
        "command": arguments.command,
        "config": json.loads(CONFIG.to_json()),
        "cases": {},
    }
    for case in arguments.cases:
        facts["cases"][case] = CASES[case]()
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
        if world.first:
            print(case, json.dumps(facts["cases"][case]), flush=True)
            arguments.out.write_text(json.dumps(facts, indent=1) + "\n")
    leave()


if __name__ == "__main__":
    main()
