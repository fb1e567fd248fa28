"""What a user waits for: a generated token, a training step; ours, and its peers.

The floor of a token is the time of reading all weights and of reading and writing all states once.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from bench import results, timing
from bench.model import GIB, Loss, build_fla, linear_loss, own_loss
from bench.worker import attempted, reason
from deltarule.models import CausalLM, ModelConfig, compile_blocks
from deltarule.models.adjoined import tensors_of
from deltarule.train.extra import require
from deltarule.train.step import TrainingStep

Row = dict[str, Any]
Model = Literal["1M", "148M", "1.5B"]
Peer = Literal["deltarule", "deltarule-attention", "deltarule-int8", "fla", "transformers"]
# For generation transformers compiles its own model, whose cache is static.
TrainPeer = Literal[Peer, "deltarule-compiled", "transformers-compiled"]
# Bytes a second of an H200's memory, as measured by a large copy.
BANDWIDTH = {"cuda": 4.25e12, "cpu": 2e10}
WARM_UP, STEPS, TIMES = 6, 20, 3
PROMPT, SHORT = 128, 64


class Sizes(NamedTuple):
    """Of a model, and of a training step of it."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    rows: int
    tokens: int


SIZES: dict[str, Sizes] = {
    "1M": Sizes(512, 128, 2, 2, 64, 256),
    "148M": Sizes(32000, 768, 12, 6, 8, 1024),
    "1.5B": Sizes(32000, 2048, 24, 16, 8, 4096),
}


@dataclass(frozen=True)
class GenerateBenchRun:
    """Time generation after a prompt of 128 tokens, the prompt included, beside the floor."""

    model: tuple[Model, ...] = field(default_factory=lambda: fitting("1.5B"))
    """Gated DeltaNet of these sizes, or attention of the same layers and width."""
    peer: tuple[Peer, ...] = ("deltarule", "fla", "transformers")
    """Ours, also with attention or with weights of int8 by torchao, FLA's Gated DeltaNet, and
    transformers' Llama with a static cache."""
    batch: tuple[int, ...] = (1, 32)
    """Rows that are continued together."""
    new_tokens: int = 256
    """Tokens added to each row."""
    output: Path = Path("bench_generate.json")
    """Raw figures."""


@dataclass(frozen=True)
class TrainBenchRun:
    """Time training steps (bfloat16, fused AdamW, clipping), eager and as CUDA graphs."""

    model: tuple[Model, ...] = field(default_factory=lambda: fitting("1M", "148M", "1.5B"))
    """Gated DeltaNet of these sizes, or attention of the same layers and width."""
    peer: tuple[TrainPeer, ...] = ("deltarule", "fla", "transformers", "transformers-compiled")
    """Ours, also with attention or under torch.compile, FLA's Gated DeltaNet with its fused loss
    of linear logits, and transformers' Llama with PyTorch's attention, as it is and compiled."""
    output: Path = Path("bench_train.json")
    """Raw figures."""


def bench_generate(run: GenerateBenchRun) -> None:
    """Time every model, peer and batch; each figure is written at once."""
    pairs = [(name, peer) for name in run.model for peer in run.peer]
    cases = [(*pair, {"batch": batch}) for pair in pairs for batch in run.batch]
    attempt("generate", cases, partial(time_generation, new=run.new_tokens), run.output)


def bench_train(run: TrainBenchRun) -> None:
    cases = [(name, peer, dict[str, Any]()) for name in run.model for peer in run.peer]
    attempt("train", cases, time_training, run.output)


def attempt(
    kind: str, cases: Iterable[tuple[Model, TrainPeer, Row]], time: Callable[..., Row], output: Path
) -> None:
    """File the figures of each case; what one of them raises is its row."""

    if device() == "cpu":
        print("PyTorch sees no CUDA device: timed on the CPU, unasked the 1M model alone")

    def found() -> Iterator[results.Found]:
        for name, peer, options in cases:
            figures = attempted(partial(time, peer, SIZES[name], device(), **options))
            yield peer, {"kind": kind, "model": name, **options}, figures

    results.file_each(results.new_report(sys.argv[1:]), found(), output)


def time_generation(peer: Peer, sizes: Sizes, device: str, *, batch: int, new: int) -> Row:
    """Milliseconds a token of greedy generation, the best of three after a first."""
    model: Any = built(peer, sizes, device)[0]
    prompts = torch.randint(sizes.vocab_size, (batch, PROMPT), device=device)
    moved = sum(x.nbytes for parameter in model.parameters() for x in tensors_of(parameter))
    if isinstance(model, CausalLM):
        generate = partial(model.generate, list(prompts), max_new_tokens=new, temperature=0)
        # Attention's cache does not count.
        moved += 2 * model.init_state(batch).num_bytes
    else:
        # FLA's models have a cache of their own.
        cache = {"cache_implementation": "static"} if peer == "transformers" else {}
        generate = partial(
            model.generate, prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new,
            min_new_tokens=new, do_sample=False, pad_token_id=0, **cache,
        )  # fmt: skip
    first = timing.host_seconds(generate)
    seconds = min(timing.host_seconds(generate) for _ in range(TIMES))
    return {
        "parameters": sum(x.numel() for x in model.parameters()), "prompt": PROMPT,
        "new_tokens": new, "first_s": first, "ms_per_token": seconds / new * 1e3,
        "floor_ms": moved / BANDWIDTH[device] * 1e3,
    }  # fmt: skip


def time_training(peer: TrainPeer, sizes: Sizes, device: str) -> Row:
    """Milliseconds of a step, eager and on a GPU as a graph, of the host and the GPU; memory."""
    model, loss_of = built(peer, sizes, device)
    text = torch.randint(sizes.vocab_size, (sizes.rows, sizes.tokens + 1), device=device)
    row: Row = {"parameters": sum(x.numel() for x in model.parameters())}
    row |= {"rows": sizes.rows, "tokens": sizes.tokens}
    for graphs in kinds_of_steps(device):
        optimizer = torch.optim.AdamW(
            model.parameters(), torch.tensor(1e-4, device=device), fused=True, capturable=True
        )
        optimizer._warned_capturable_if_run_uncaptured = True
        step = TrainingStep(loss_of, optimizer, clip=1.0, cuda_graphs=graphs)
        try:
            row |= time_steps(step, text)
        except RuntimeError as error:
            if not graphs:
                raise
            # The eager figures of a peer that cannot be captured are its own all the same.
            row["graph_error"] = reason(error)
    return row


def kinds_of_steps(device: str) -> tuple[bool, ...]:
    """Whether steps are graphs: eager first, and on a GPU as graphs, too."""
    return (False,) if device == "cpu" else (False, True)


def time_steps(step: TrainingStep, text: Tensor) -> Row:
    """Figures of one kind of step; a CPU is its own host."""
    count, warm_up = (STEPS, WARM_UP) if text.is_cuda else (2, 1)

    def several(count: int) -> None:
        for _ in range(count):
            step([text])

    if text.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    several(warm_up)
    ms = timing.host_seconds(partial(several, count)) / count * 1e3
    if step.graphs:
        return {"graph_ms": ms, "gpu_ms": sum(timing.kernel_ms(partial(step, [text])).values())}
    if not text.is_cuda:
        return {"eager_ms": ms}
    peak = torch.cuda.max_memory_allocated() / GIB
    # So few tokens that a GPU waits for the host.
    host_ms = timing.host_us(partial(step, [text[:1, : SHORT + 1]]), TIMES) / 1e3
    return {"eager_ms": ms, "peak_GiB": peak, "host_ms": host_ms}


def built(peer: TrainPeer, sizes: Sizes, device: str) -> tuple[nn.Module, Loss]:
    """A model of a peer, in bfloat16 on a GPU, and its loss of text that holds no logits."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    mlp = {"intermediate_size": 16 * -(-sizes.hidden_size * 8 // 48)}
    if peer in ("transformers", "transformers-compiled"):
        transformers = require("transformers", "hf")
        config = transformers.LlamaConfig(
            vocab_size=sizes.vocab_size, hidden_size=sizes.hidden_size,
            num_hidden_layers=sizes.num_layers, num_attention_heads=sizes.num_heads,
            eos_token_id=None, attn_implementation="sdpa", **mlp,
        )  # fmt: skip
        llama = transformers.LlamaForCausalLM(config).to(device, dtype)
        if peer == "transformers-compiled":
            llama.model.compile()
        hidden = partial(llama.model, use_cache=False)
        return llama, linear_loss(lambda x: hidden(x).last_hidden_state, llama.lm_head)
    name = "attention" if peer == "deltarule-attention" else "gated_deltanet"
    options: dict[str, Any] = dict(zip(Sizes._fields[:4], sizes, strict=False))
    ours = ModelConfig(layer_types=name, tie_embeddings=False, **options)
    if peer == "fla":
        # As many keys and values as ours has: three quarters of the channels, and twice that.
        keys = sizes.hidden_size * 3 // 4 // sizes.num_heads
        given = {"num_heads": sizes.num_heads, "head_dim": keys, "expand_v": 2, **mlp}
        return build_fla("GatedDeltaNet", ours, given, device, whole_logits=False)
    with torch.device(device):
        model = CausalLM(ours).to(dtype)
    if peer == "deltarule-compiled":
        compile_blocks(model)
    if peer == "deltarule-int8":
        # Imported where it is asked for.
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
    return model, own_loss(model)


def fitting(*models: Model) -> tuple[Model, ...]:
    """These on a GPU; a CPU would take hours over any but the smallest."""
    return models if device() == "cuda" else ("1M",)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
