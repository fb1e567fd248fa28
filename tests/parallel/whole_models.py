"""What a model computes on several processes, beside what it computes on one, in float64."""

import copy
import dataclasses
import functools
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from bench.travel import counted
from deltarule.models import CausalLM, ModelConfig
from deltarule.models.loss import next_token_loss
from deltarule.nn import MIXERS, attention
from deltarule.nn import recomputed as recomputed_file
from deltarule.nn.ring_attention import core
from deltarule.nn.rule import LayerCall
from deltarule.ops.context import make_context
from deltarule.ops.context.rows import LastRows
from deltarule.ops.delta_rule.spanning import Join
from deltarule.parallel import MeshOptions, make_mesh, parallelize
from deltarule.parallel.sharding import clip_sharded

VOCAB = 257
# What a mixer has besides the sizes of all.
FIELDS: dict[str, dict[str, Any]] = {
    **{x: {"num_v_heads": 8} for x in ("gated_deltanet", "deltanet", "gated_delta_product")},
    "kda": {"num_v_heads": 8, "tie_embeddings": False},
    "linear_attention": {"feature_map": "hedgehog"}, "lightning": {"output_norm": "all"},
    "attention": {"num_kv_heads": 4}, "sliding_window": {"num_kv_heads": 4, "window": 5},
    "experts": {
        "layer_types": "gated_deltanet", "mlp_layer_types": ("sparse", "dense"), "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_gate": True,
        "shared_expert_intermediate_size": 32, "scoring_func": "sigmoid",
    },
}  # fmt: skip


def config_of(mixer: str) -> ModelConfig:
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_layers": 2, "num_heads": 4}
    return ModelConfig(**{"layer_types": mixer, "mlp_size": 64, **sizes} | FIELDS.get(mixer, {}))


def small(mixer: str, **fields: Any) -> ModelConfig:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_layers": 1, "num_heads": 2}
    return ModelConfig(layer_types=mixer, **sizes | fields)


@functools.cache
def mesh_of(options: MeshOptions) -> DeviceMesh:
    """One for all tests: every group of gloo keeps threads of its own."""
    return make_mesh("cpu", options)


def drawn(config: ModelConfig) -> CausalLM:
    """Weights that are neither zero nor one, which would hide a gradient that is missing."""
    torch.manual_seed(0)
    model = CausalLM(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach(), b.detach()
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def gradient_error(model: CausalLM, alone: CausalLM) -> float:
    """The largest, of a model of which parameters may be shared out."""
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
    assert [p is None for p, _ in pairs] == [q is None for _, q in pairs]
    used = [(p, q) for p, q in pairs if q is not None]
    gathered = ((p.full_tensor() if isinstance(p, DTensor) else p, q) for p, q in used)
    return max(relative(p.view_as(q), q) for p, q in gathered)


def heads_recomputed(mixer: str, tensor: int) -> dict[str, float]:
    """The same as a GPU does it: norms and convolutions are computed again in the backward."""
    users = [file for file in sys.modules.values() if hasattr(file, "recomputed")]
    users = [file for file in users if file.__name__.startswith("deltarule.")]
    plain = recomputed_file.recomputed
    assert len(users) > 2
    for file in users:
        file.recomputed = recomputed_file.remembered
    try:
        return heads_and_shards(mixer, tensor)
    finally:
        for file in users:
            file.recomputed = plain


def said(call: Callable[[], object]) -> str:
    """By which error a call is refused."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def heads_refused(**fields: int) -> str:
    """What `parallelize` says to sizes that cannot be split."""
    model = drawn(dataclasses.replace(config_of("gated_deltanet"), **fields))
    before = [name for name, _ in model.named_parameters()]
    mesh = mesh_of(MeshOptions(tensor=dist.get_world_size()))
    told = said(lambda: parallelize(model, mesh))
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert [name for name, _ in model.named_parameters()] == before
    return told


def replicated(mixer: str) -> list[str]:
    """What every process has all of, where products are in bfloat16."""
    model = drawn(config_of(mixer)).float()
    names = {id(p): name for name, p in model.named_parameters()}
    plan = parallelize(model, mesh_of(MeshOptions()), bfloat16=True)
    return sorted({names[id(p)].split(".", 2)[2] for p in plan.replicated})


def widened_sums(mixer: str) -> tuple[bool, float, int]:
    """Whether gradients that travel in 16 bits sum to the bits of those that travel in 32.

    Returns:
        That; the bytes that left in 16 bits, and how many numbers of the blocks are sharded.
    """
    found = []
    for accumulates in (True, False):
        model = drawn(config_of(mixer)).float()
        parallelize(model, mesh_of(MeshOptions()), bfloat16=True, accumulates=accumulates)
        torch.manual_seed(dist.get_rank())
        tokens, targets = torch.randint(VOCAB, (2, 1, 32)).unbind()
        with counted() as sent, torch.autocast("cpu", torch.bfloat16):
            model.loss(model.hidden(tokens)[0], targets).backward()
        found.append([p.grad.to_local() for p in model.parameters() if isinstance(p, DTensor)])
    same = all(torch.equal(p, q) and q.dtype == torch.float32 for p, q in zip(*found, strict=True))
    sharded = [p.numel() for p in model.blocks.parameters() if isinstance(p, DTensor)]
    return same, 1e6 * sent["all_to_all_single"], sum(sharded)


def heads_and_shards(mixer: str, tensor: int) -> dict[str, float]:
    """Errors of a model split by heads over `tensor` processes, and sharded over the others.

    Each process of the shards has a packed row of its own.
    """
    alone = drawn(config_of(mixer))
    mesh = mesh_of(MeshOptions(tensor=tensor))
    rows = mesh["shard"].size()
    tokens, targets = torch.randint(VOCAB, (2, rows, 23)).unbind()
    targets[0, 3] = -100
    offsets = torch.tensor([0, 9, 23])
    expected, logits = 0.0, []
    for row in range(rows):
        x, _ = alone.hidden(tokens[row : row + 1], cu_seqlens=offsets)
        logits.append(alone.logits(x))
        expected = expected + next_token_loss(logits[-1], targets[row : row + 1]) / rows
    expected.backward()
    model = copy.deepcopy(alone)
    model.zero_grad()
    parallelize(model, mesh)
    row = mesh["shard"].get_local_rank()
    x, _ = model.hidden(tokens[row : row + 1], cu_seqlens=offsets)
    mine, own_targets = model.logits(x), targets[row : row + 1]
    loss = model.loss(x, own_targets)
    errors = {
        "logits": relative(mine, logits[row]),
        "loss": relative(next_token_loss(mine, own_targets), loss),
    }
    loss = loss / rows
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh["shard"].get_group())
    errors |= {"total": relative(total, expected), "gradient": gradient_error(model, alone)}
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    errors["norm"] = relative(clip_sharded(list(model.parameters()), 1.0), norm)
    return errors | {"clipped": gradient_error(model, alone)}


def bytes_of_a_layer(tokens: int, exchange: str) -> dict[str, float]:
    """Bytes that leave a process for one recurrent layer, forwards and backwards, by collective."""
    layer = MIXERS["gated_deltanet"](32, num_heads=2, head_k_dim=8, head_v_dim=16)
    context = make_context(tokens, exchange=exchange)
    x = torch.randn(1, context.last - context.first, 32, requires_grad=True)
    with counted() as sent:
        layer(x, context=context)[0].sum().backward()
    return {name: round(1e6 * most) for name, most in sent.items()}


class Noted:
    """A message of which it is written down when it is waited for."""

    def __init__(self, work: Any, note: Any) -> None:
        self.work, self.note = work, note

    def wait(self) -> None:
        self.note()
        self.work.wait()


def order_of_a_layer(exchange: str, mixer: str = "gated_deltanet", names: str = "kg") -> list[str]:
    """What a layer does, forwards and then backwards: messages, and the projections named."""
    done: list[str] = []

    def product(name: str) -> Any:
        def hook(module: Any, given: Any, y: Tensor) -> None:
            done.append(name)
            node = y.grad_fn
            while "Mm" not in node.name():
                node = node.next_functions[0][0]
            node.register_hook(lambda *_: done.append(f"d {name}"))

        return hook

    gather, batch = dist.all_gather, dist.batch_isend_irecv

    def noted_gather(*given: Any, **options: Any) -> Any:
        done.append("states leave")
        return Noted(gather(*given, **options), lambda: done.append("states come"))

    def noted_batch(operations: list[Any]) -> list[Any]:
        name = "rows" if operations[0].tensor.ndim == 3 else "states"
        done.append(f"{name} leave")
        works = batch(operations)
        return [Noted(w, lambda: done.append(f"{name} come")) for w in works]

    layer = MIXERS[mixer](32, num_heads=2, head_k_dim=8, head_v_dim=16, output_gate=True)
    for name in names:
        getattr(layer, f"{name}_proj").register_forward_hook(product(name))
    context = make_context(24, exchange=exchange)
    x = torch.randn(1, context.last - context.first, 32, requires_grad=True)
    dist.all_gather, dist.batch_isend_irecv = noted_gather, noted_batch
    try:
        y, _ = layer(x, context=context)
        done.append("forward is done")
        y.sum().backward()
    finally:
        dist.all_gather, dist.batch_isend_irecv = gather, batch
    # One message may be several tensors.
    return [a for a, b in zip(done, [*done[1:], ""], strict=True) if a != b]


def ring_of_attention(kv_heads: int) -> dict[str, float]:
    """Errors of a softmax layer of which no process has the keys and values of others."""
    torch.manual_seed(0)
    layer = MIXERS["attention"](32, num_heads=4, num_kv_heads=kv_heads).double()
    x, d_y = torch.randn(2, 2, 24, 32).double().unbind()
    x.requires_grad_()
    y, _ = layer(x)
    expected = torch.autograd.grad(y, [x, *layer.parameters()], d_y)
    context = make_context(24)
    mine = context.part(x.detach()).requires_grad_()
    given, gathering = attention.all_rows, core()._AllGatherRotater
    # Neither we gather keys nor PyTorch, which does unless it is told to pass them on.
    attention.all_rows = core()._AllGatherRotater = None
    try:
        part, _ = layer(mine, context=context)
        d_x, *found = torch.autograd.grad(part, [mine, *layer.parameters()], context.part(d_y))
    finally:
        attention.all_rows, core()._AllGatherRotater = given, gathering
    errors = {"y": relative(part, context.part(y)), "dx": relative(d_x, context.part(expected[0]))}
    for gradient, want in zip(found, expected[1:], strict=True):
        dist.all_reduce(gradient)
        errors["weights"] = max(errors.get("weights", 0.0), relative(gradient, want))
    return errors


def context_model(mixer: str, exchange: str, packed: bool, heads: int = 1) -> dict[str, float]:
    """Errors of a model over a context, alone or beside heads: hidden states and all gradients."""
    torch.manual_seed(0)
    tokens = 64
    # Documents that begin one and two tokens before the next process's first, and just there.
    offsets = [0, 5, 15, 23, 32, 46, 58, 64] if packed else None
    window = 9 if mixer == "sliding_window" else None
    alone = drawn(small(mixer, num_layers=2, num_heads=2 * heads, window=window))
    rows = 1 if packed else 2
    x, targets = torch.randint(97, (2, rows, tokens)).unbind()
    spans = None if offsets is None else torch.tensor(offsets)
    hidden, last = alone.hidden(x, cu_seqlens=spans)
    next_token_loss(alone.logits(hidden), targets).backward()
    model = copy.deepcopy(alone)
    model.zero_grad()
    processes = dist.get_world_size() // heads
    mesh = mesh_of(MeshOptions(context=processes, tensor=heads))
    if heads > 1:
        parallelize(model, mesh)
    group = mesh["context"].get_group()
    context = make_context(tokens, cu_seqlens=offsets, exchange=exchange, group=group)
    mine, _ = model.hidden(context.part(x), context=context)
    share = (context.last - context.first) / tokens
    (model.loss(mine, context.part(targets)) * share).backward()
    errors = {"hidden": relative(mine, context.part(hidden))}
    for p in model.parameters() if heads == 1 else ():
        if p.grad is not None:
            dist.all_reduce(p.grad)
    errors["gradient"] = gradient_error(model, alone)
    # Last: what is sharded is whole from here on.
    with torch.no_grad():
        again, after = model.hidden(context.part(x), context=context)
    errors["without gradients"] = relative(again, context.part(hidden))
    if context.rank == context.size - 1 and heads == 1:
        # What a run on one process would go on from.
        pairs = [(a[name], b[name]) for a, b in zip(after, last, strict=True) for name in b]
        errors["state"] = max((relative(a[-1] * 1.0, b[-1] * 1.0) for a, b in pairs), default=0.0)
    return errors


def refused(mixer: str) -> str:
    """What a model says that cannot share a sequence out."""
    tokens, model = torch.zeros(1, 16, dtype=torch.int64), CausalLM(small(mixer))
    return said(lambda: model.hidden(tokens, context=make_context(32)))


def kept_after_a_step(mixer: str) -> int:
    """Values of a layer's call that are there after a step, with no help of a garbage collector."""
    torch.manual_seed(0)
    model, context = CausalLM(small(mixer)), make_context(24)

    def step() -> None:
        hidden, _ = model.hidden(context.part(torch.randint(97, (1, 24))), context=context)
        hidden.sum().backward()

    # What the first call makes once stays.
    step()
    gc.collect()
    gc.disable()
    try:
        step()
        return sum(isinstance(x, (LayerCall, Join, LastRows)) for x in gc.get_objects())
    finally:
        gc.enable()
