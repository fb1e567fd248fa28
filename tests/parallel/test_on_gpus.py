"""A hybrid over two GPUs in bfloat16: its errors are those of one GPU.

    torchrun --nproc-per-node 2 tests/parallel/test_on_gpus.py

prints how much larger they are, each against float32; with `cpu` behind it, on two CPUs.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deltarule import make_context
from deltarule.models import CausalLM, ModelConfig
from deltarule.nn import ring_attention
from deltarule.ops.context import Context

LAYERS = ("gated_deltanet", "attention", "kda", "deltanet")


def passed(
    model: CausalLM, tokens: Tensor, low: bool, context: Context | None = None
) -> dict[str, Tensor]:
    """The hidden states here, and the gradients of the mean loss of all tokens."""
    model.zero_grad()
    here, targets = (x if context is None else context.part(x) for x in tokens)
    with torch.autocast(here.device.type, torch.bfloat16, enabled=low):
        x, _ = model.hidden(here, context=context)
        loss = model.loss(x, targets) * here.shape[1] / tokens.shape[2]
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    if context is not None:
        dist.all_reduce(gradients)
    return {"hidden": x.detach(), "gradients": gradients}


def ratios(device: str, tokens: int) -> dict[str, float]:
    """Errors over the processes as multiples of those of one."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=257, hidden_size=256, num_layers=len(LAYERS), num_heads=4, layer_types=LAYERS,
        head_k_dim=64, head_v_dim=64,
    )  # fmt: skip
    model = CausalLM(config).to(device)
    given, context = torch.randint(257, (2, 2, tokens), device=device), make_context(tokens)
    expected = passed(model, given, False)
    alone, shared = passed(model, given, True), passed(model, given, True, context)
    for found in (expected, alone):
        found["hidden"] = context.part(found["hidden"])
    return {
        name: float((shared[name] - y).norm() / (alone[name] - y).norm())
        for name, y in expected.items()
    }


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_hybrid_over_two_gpus_errs_no_more_than_on_one() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    for line in done.stdout.splitlines():
        found = json.loads(line)
        assert found.pop("ring")
        assert max(found.values()) < 1.1, found


if __name__ == "__main__":
    place = (sys.argv[1:] or ["cuda"])[0]
    if place == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if place == "cpu" else "cpu:gloo,cuda:nccl")
    said = ratios(place, 256 if place == "cpu" else 8192)
    print(json.dumps({"ring": ring_attention.core() is not None, **said}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
