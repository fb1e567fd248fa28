"""Hooks on a patched model: where documents begin, and which tokens are padding.

They are partials of functions at module level, so that a hooked model can still be copied. What
they find is a note to the functions that layers call: half of transformers' layers never see the
offsets of packed documents, and none hands its padding mask on. A thread has one note at a time,
since a layer calls its functions itself.
"""

import dataclasses
import inspect
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from deltarule.ops.history import sequence_of

AFRESH = "packed documents start afresh: give them without past_key_values or cache_params"
# What arguments of transformers are called that hold a cache: the first since 5.24.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# What the cache of an output is called here, and of a call of a model of text.
OUTPUTS = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
CACHE = next(name for name in CACHE_NAMES if name in OUTPUTS)


def cache_of(given: Mapping[str, Any]) -> Any:
    """The cache among arguments, or None."""
    return next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)


class Note(threading.local):
    """The note of this thread."""

    def __init__(self) -> None:
        """Begin empty; Python calls this in each thread."""
        # Offsets [N + 1] of the documents in all rows laid end to end; None: no packing.
        self.cu_seqlens: Tensor | None = None
        # Those of the models around the running one, the innermost last.
        self.outer: list[Tensor | None] = []
        # [B, T] bool, False at the padding of the running layer; None: no padding.
        self.real: Tensor | None = None
        # [B, D, W], the convolution's inputs up to each row's last real token, from the convolution
        # to the hook after the layer; None: it was not asked for.
        self.history: Tensor | None = None


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


# Where transformers keeps the function that checkpoints a layer.
CHECKPOINT = "_gradient_checkpointing_func"


def hook_packing(model: nn.Module, mixing: str | None, undo: ExitStack) -> None:
    """Find the documents at each call of the model, or of a model inside it.

    A wrapper such as PEFT's calls the forward of the model in it directly, past its hooks: then
    those of the backbone find them. `mixing` names a layer that mixes documents whatever is done
    here, so that packing is refused.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            names = tuple(inspect.signature(type(module).forward).parameters)[1:]
            enter = partial(_enter_model, names, mixing)
            undo.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            undo.enter_context(module.register_forward_hook(_leave_model, always_call=True))


def _enter_model(
    names: tuple[str, ...],
    mixing: str | None,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    NOTE.outer.append(NOTE.cu_seqlens)
    if NOTE.cu_seqlens is None:
        found = find_documents(dict(zip(names, args, strict=False)) | kwargs)
        if found is not None and mixing is not None:
            raise ValueError(
                f"packed documents would be mixed by {mixing}, which transformers writes without "
                "a mask for them: give each document a row of its own"
            )
        NOTE.cu_seqlens = found
    if NOTE.cu_seqlens is not None and module.training:
        # Every checkpointed layer remembers its documents; checkpointing may begin at any time.
        for layer in module.modules():
            function = layer.__dict__.get(CHECKPOINT)
            if function is not None and not remembers(function):
                layer.__dict__[CHECKPOINT] = partial(remembering, function)


def _leave_model(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    NOTE.cu_seqlens = NOTE.outer.pop()


def find_documents(given: Mapping[str, Any]) -> Tensor | None:
    """Offsets [N + 1] of packed documents from a model's arguments; None where nothing is packed.

    From offsets, from numbers of sequences, or from positions that start again, which count as in
    transformers' attention: without a mask and without a cache.
    """
    if (cu_seqlens := given.get("cu_seq_lens_q")) is not None:
        return cu_seqlens
    if (numbers := given.get("seq_idx")) is not None:
        return offsets(numbers.diff(dim=-1) != 0)
    positions = given.get("position_ids")
    if positions is None or given.get("attention_mask") is not None or cache_of(given) is not None:
        return None
    if positions.ndim == 3:
        # Multimodal positions: of four rows the first counts the text.
        if positions.shape[0] != 4:
            return None
        positions = positions[0]
    inputs = given.get("input_ids")
    inputs = given.get("inputs_embeds") if inputs is None else inputs
    if inputs is None or positions.shape[-1] < 2:
        return None
    return offsets(positions.expand(inputs.shape[0], -1).diff(dim=-1) != 1)


def offsets(starts: Tensor) -> Tensor | None:
    """Offsets in all rows laid end to end, from [B, T - 1] starts after the first; None: no start.

    How many there are has to be read back from the device.
    """
    batch, tokens = starts.shape[0], starts.shape[1] + 1
    places = F.pad(starts, (1, 0), value=True).flatten().nonzero().flatten().to(torch.int32)
    if len(places) == batch:
        return None
    return F.pad(places, (0, 1), value=batch * tokens)


def with_documents(create: Callable[..., Any]) -> Callable[..., Any]:
    """A maker of attention masks that keeps the documents apart, too.

    transformers' own does so from `position_ids` alone, not in every family, and not with the empty
    cache that a model makes by default.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if NOTE.cu_seqlens is not None and kwargs.get("attention_mask") is None:
            rows = kwargs["inputs_embeds"].shape[:2]
            kwargs |= {name: None for name in CACHE_NAMES if name in kwargs}
            kwargs["position_ids"] = positions(NOTE.cu_seqlens, *rows)
        return create(*args, **kwargs)

    return call


def positions(cu_seqlens: Tensor, batch: int, tokens: int) -> Tensor:
    """[B, T] each token's place in its document."""
    token = torch.arange(batch * tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return (token - cu_seqlens[sequence_of(cu_seqlens, len(token))]).view(batch, tokens)


def remembering(checkpoint: Any, function: Any, *args: Any) -> Any:
    """Run it now and again in the backward pass with what this thread's note says now."""
    return checkpoint(partial(call_packed, NOTE.cu_seqlens, function), *args)


def remembers(function: Any) -> bool:
    return isinstance(function, partial) and function.func is remembering


def forget_checkpointing(model: nn.Module) -> None:
    """Give every layer transformers' own function back."""
    for layer in model.modules():
        function: Any = layer.__dict__.get(CHECKPOINT)
        if remembers(function):
            layer.__dict__[CHECKPOINT] = function.args[0]


def hook_padding(layer: nn.Module, undo: ExitStack) -> None:
    """Show a recurrent layer's padding mask to the functions that it calls."""
    undo.enter_context(layer.register_forward_pre_hook(_enter_layer, with_kwargs=True))
    leave = layer.register_forward_hook(_leave_layer, with_kwargs=True, always_call=True)
    undo.enter_context(leave)


def _enter_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # A layer without a convolution looks at its own state.
    goes_on = NOTE.cu_seqlens is not None and hasattr(layer, "conv1d")
    cache = cache_of(kwargs) if goes_on else None
    if cache is not None and cache.get_conv_state(layer.layer_idx, state_idx=0) is not None:
        raise ValueError(AFRESH)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] > 1:
        NOTE.real = mask.bool()


def _leave_layer(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Mend the convolution's inputs in the cache, which the layer filled with padding."""
    history, NOTE.real, NOTE.history = NOTE.history, None, None
    cache = cache_of(kwargs)
    if history is None or cache is None or cache.is_recording_past(layer.layer_idx):
        return
    kept = cache.layers[layer.layer_idx].conv_states[0]
    kept.copy_(history[..., -kept.shape[-1] :])
