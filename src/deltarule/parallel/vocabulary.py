"""Embedding, head and loss with the vocabulary split over processes.

The embedding is a sum of lookups, of which one finds the token. Each process has the logits of its
own tokens; the loss sends three numbers a token:

    lse = log sum_ranks e^{lse_rank}        d logits = e^{logits - lse} - 1_target
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from deltarule.models import CausalLM
from deltarule.parallel.local import Group, enter, leave
from deltarule.parallel.sharding import local_part


class Vocabulary(NamedTuple):
    """Which tokens this process has: those from `first` on that its part of the weights holds."""

    mesh: DeviceMesh
    group: Group
    first: int


def split_vocabulary(model: CausalLM, mesh: DeviceMesh) -> dict[str, int]:
    """Split embedding and head of a model by tokens; return the axes, as `split_heads` does."""
    # As a DTensor is split: the last parts are smaller, or empty.
    first = -(-model.config.vocab_size // mesh.size()) * mesh.get_local_rank()
    vocabulary = Vocabulary(mesh, mesh.get_group(), min(first, model.config.vocab_size))
    weights: dict[str, nn.Embedding | nn.Linear] = {"embedding.weight": model.embedding}
    if model.head is not None:
        weights["head.weight"] = model.head
    for module in weights.values():
        whole = module.weight
        split = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
        module.weight = nn.Parameter(split, requires_grad=whole.requires_grad)
    # In place of the methods of this one model.
    model.embedding.forward = partial(embed, model, vocabulary)  # type: ignore[method-assign]
    model.logits = partial(logits, model, vocabulary)  # type: ignore[method-assign]
    model.loss = partial(loss, model, vocabulary)  # type: ignore[method-assign]
    return dict.fromkeys(weights, 0)


def embed(model: CausalLM, vocabulary: Vocabulary, tokens: Tensor) -> Tensor:
    """[B, T] -> [B, T, hidden_size], the same on every process."""
    weight = local_part(model.embedding.weight)
    place, mine = own(tokens, vocabulary.first, len(weight))
    rows = weight.new_zeros(*tokens.shape, weight.shape[1])
    if len(weight):
        rows = F.embedding(place, weight).masked_fill(~mine.unsqueeze(-1), 0)
    return leave(rows, vocabulary.group)


def logits(model: CausalLM, vocabulary: Vocabulary, x: Tensor) -> Tensor:
    """All logits on every process; the loss does without them."""
    own = own_logits(model, vocabulary, x)
    whole = own.new_empty(*own.shape[:-1], model.config.vocab_size, device="meta")
    return DTensor.from_local(
        own, vocabulary.mesh, [Shard(own.ndim - 1)], run_check=False, shape=whole.shape,
        stride=whole.stride(),
    ).full_tensor()  # fmt: skip


def own_logits(model: CausalLM, vocabulary: Vocabulary, x: Tensor) -> Tensor:
    """[..., hidden_size] -> [..., tokens of this process]."""
    owner = model.embedding if model.head is None else model.head
    return model.scaled(F.linear(enter(x, vocabulary.group), local_part(owner.weight)))


def loss(model: CausalLM, vocabulary: Vocabulary, x: Tensor, targets: Tensor) -> Tensor:
    """The loss of what `hidden` returned, the same on every process."""
    logits = own_logits(model, vocabulary, x)
    return _VocabularyLoss.apply(logits, targets, vocabulary)  # type: ignore[no-untyped-call]


def own(tokens: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Rows of the tokens in this process's table, 0 for others; and which tokens are its own."""
    mine = (tokens >= first) & (tokens < first + size)
    return (tokens - first).where(mine, 0), mine


class _VocabularyLoss(torch.autograd.Function):
    """The mean cross entropy of `next_token_loss`, from the logits of each process's own tokens."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        place, mine = own(targets, vocabulary.first, logits.shape[-1])
        if logits.shape[-1]:
            lse = logits.to(wide).logsumexp(-1)
            hit = logits.gather(-1, place.unsqueeze(-1)).squeeze(-1).to(wide) * mine
        else:
            lse, hit = (targets.new_full(targets.shape, x, dtype=wide) for x in (-torch.inf, 0.0))
        largest = lse.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, vocabulary.group)
        sums = torch.stack([(lse - largest).exp(), hit])
        dist.all_reduce(sums, group=vocabulary.group)
        lse, counts = sums[0].log() + largest, targets != -100
        weights = counts / counts.sum().clamp(min=1).to(wide)
        ctx.save_for_backward(logits, lse, place, mine, weights)
        return ((lse - sums[1]) * weights).sum()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, None, None]:
        logits, lse, place, mine, weights = ctx.saved_tensors
        errors = (logits - lse.unsqueeze(-1)).exp()
        if logits.shape[-1]:
            errors = errors.scatter_add(
                -1, place.unsqueeze(-1), -mine.to(errors.dtype).unsqueeze(-1)
            )
        return (errors * (d_loss * weights).unsqueeze(-1)).to(logits.dtype), None, None
