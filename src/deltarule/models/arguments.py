"""What a language model refuses, whatever its layers."""

import torch
from torch import Tensor

from deltarule.nn import ModelState
from deltarule.ops.checks import check_axes, check_dense, readable
from deltarule.ops.context import Context, check_context
from deltarule.ops.pack import check_cu_seqlens


def check_inputs(
    tokens: Tensor,
    state: ModelState | None,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    context: Context | None,
    *,
    vocab_size: int,
    num_layers: int,
    device: torch.device,
) -> None:
    _check_tokens(tokens, vocab_size, device)
    if context is not None:
        check_context(context, tokens.shape[1], "tokens", cu_seqlens)
        cu_seqlens = context.cu_seqlens(tokens.device)
    if mask is not None:
        check_dense("mask", mask, " or None")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape):
        raise ValueError(
            f"mask must be bool {list(tokens.shape)} like tokens, "
            f"got {mask.dtype} {list(mask.shape)}"
        )
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, tokens)
    if state is not None:
        sequences = len(tokens) if cu_seqlens is None else len(cu_seqlens) - 1
        check_state(state, sequences, num_layers)


def check_state(state: ModelState, sequences: int, num_layers: int) -> None:
    """A state of this many layers and sequences; each layer checks the rest of the shape."""
    if len(state) != num_layers:
        raise ValueError(
            f"state must hold the states of {num_layers} layers, got {len(state)}: "
            "it comes from another model"
        )
    rows = {len(tensor) for layer in state for tensor in layer.values()}
    if rows - {sequences}:
        raise ValueError(
            f"state must hold {sequences} rows, one a sequence, got {sorted(rows)}: "
            "state.select(rows) picks or repeats rows"
        )


def _check_tokens(tokens: Tensor, vocab_size: int, device: torch.device) -> None:
    check_axes("tokens", tokens, "[B, T]", 2)
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens must be an int64 or int32 tensor, got {tokens.dtype}")
    if tokens.device != device:
        raise ValueError(f"tokens are on {tokens.device}, but the model is on {device}")
    # Elsewhere than on the CPU, reading the values would wait for the device.
    if tokens.numel() and readable(tokens):
        smallest, largest = (int(end) for end in tokens.aminmax())
        if smallest < 0 or largest >= vocab_size:
            raise ValueError(
                f"tokens must lie in [0, vocab_size={vocab_size}), got {smallest} to {largest}"
            )
