"""What the hooks on a model tell the functions that its layers call: packed documents and padding.

Half of transformers' layers never see the offsets of packed documents, and none hands its padding
mask on. A thread has one such note at a time, since a layer calls its functions itself.
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

# What arguments of transformers are called that hold a cache: the first since 5.24.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# What the cache of an output is called here, and of a call of a model of text.
CACHE = next(
    name
    for name in CACHE_NAMES
    if name in {f.name for f in dataclasses.fields(CausalLMOutputWithPast)}
)


def cache_of(given: Mapping[str, Any]) -> Any:
    """The cache among arguments, or None."""
    return next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)


class Note(threading.local):
    """The note of this thread.

    Attributes:
        cu_seqlens: Offsets [N + 1] of the documents in all rows laid end to end. None: no packing.
        real: [B, T] bool, False at the padding of the running layer. None: no padding.
        history: [B, D, W], the convolution's inputs up to each row's last real token, from the
            convolution to the hook after the layer. None: it was not asked for.
        outer: The offsets of the models around the running one, the innermost last.
    """

    def __init__(self) -> None:
        """Begin empty; Python calls this in each thread."""
        self.cu_seqlens: Tensor | None = None
        self.real: Tensor | None = None
        self.history: Tensor | None = None
        self.outer: list[Tensor | None] = []


NOTE = Note()


def call_packed(cu_seqlens: Tensor | None, function: Callable[..., Any], *args: Any) -> Any:
    """The function's result, with documents that begin at these offsets."""
    before, NOTE.cu_seqlens = NOTE.cu_seqlens, cu_seqlens
    try:
        return function(*args)
    finally:
        NOTE.cu_seqlens = before


def padding_removed(real: Tensor | None, *gates: Tensor) -> tuple[Tensor, ...]:
    """Gates [B, T, ...] with zeros at padding, where nothing is written and nothing decays."""
    if real is None:
        return gates
    return tuple(gate.masked_fill(~real[(...,) + (None,) * (gate.ndim - 2)], 0) for gate in gates)


def one_row(x: Tensor) -> Tensor:
    """[B, T, ...] -> [1, B T, ...], as documents of several rows are given to an operator."""
    return x.flatten(0, 1).unsqueeze(0)


def last_documents(cu_seqlens: Tensor, batch: int, tokens: int) -> Tensor:
    """[B] the document that each row ends with."""
    ends = torch.arange(1, batch + 1, device=cu_seqlens.device, dtype=cu_seqlens.dtype) * tokens
    return torch.searchsorted(cu_seqlens[1:].contiguous(), ends)
