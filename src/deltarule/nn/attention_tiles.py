"""Softmax attention of tokens that do not see all before them, without a mask of T x T.

Rows of queries at a time, each with a mask of its own that is made where it is used and, for the
backward, made again. Packed tokens in 16 bits on a GPU go to flash attention, which takes offsets.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.nn.layout import Layout
from deltarule.nn.state import State
from deltarule.ops.dispatch import constant_when_compiled

# Rows of queries whose mask is made at once.
ROWS = 512
MAX_FLASH_CHANNELS = 256


class Sight(NamedTuple):
    """Which rows of keys T tokens see, the last T of them their own: those behind them.

    Args:
        rows: Rows of keys.
        tokens: T.
        device: Where they are.
        window: Tokens that a token sees, itself included. None: all.
        sequence: [T] of packed tokens, the sequence of each. None: a row is a sequence.
        valid: [B, rows - T] False at earlier rows that hold no token. None: all do.
        cu_seqlens: Offsets of packed sequences.
    """

    rows: int
    tokens: int
    device: torch.device
    window: int | None = None
    sequence: Tensor | None = None
    valid: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def mask(self, first: int, last: int) -> tuple[int, Tensor]:
        """The lowest row that tokens first..last - 1 may see, and [B or 1, 1, last - first, seen].

        The rows seen end with that of the last token.
        """
        before = self.rows - self.tokens
        lowest = 0 if self.window is None else max(0, before + first - self.window + 1)
        column = torch.arange(lowest - before, last, device=self.device)
        behind = torch.arange(first, last, device=self.device).unsqueeze(1) - column
        visible = behind >= 0
        if self.window is not None:
            visible = visible & (behind < self.window)
        if self.sequence is not None:
            same = self.sequence[first:last].unsqueeze(1) == self.sequence[lowest:last]
            visible = visible & same
        if self.valid is None:
            return lowest, visible[None, None]
        valid = F.pad(self.valid, (0, last), value=True)[:, lowest:]
        return lowest, (visible & valid.unsqueeze(1)).unsqueeze(1)


def sight_of(before: State, layout: Layout, window: int | None) -> Sight | None:
    """Which rows the tokens of a call see; None where plain causal is enough."""
    rows, tokens = before["keys"].shape[1], layout.tokens
    if rows == 0 and layout.cu_seqlens is None and (window is None or tokens <= window):
        # Padding needs no mask: `to_front` has put it behind every real token.
        return None
    valid = before["valid"] if rows else None
    place = layout.sequence, valid, layout.cu_seqlens
    return Sight(rows + tokens, tokens, layout.device, window, *place)


# From queries, keys and values [B, T, heads, D] and what each token sees to what it reads.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def attend_by_sight(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float | None = None
) -> Tensor:
    """Attention of queries [B, T, H, D] to rows [B, L + T, heads, D], as far as each sees."""
    if sight.cu_seqlens is not None and sight.window is None and takes_offsets(q, v):
        return flash(q, k, v, sight.cu_seqlens, scale)
    if sight.tokens <= ROWS:
        return attend(q, k, v, sight.mask(0, sight.tokens)[1])
    return torch.cat(
        [
            again(partial(attend_tile, attend, sight=sight, first=first), q, k, v)
            for first in range(0, sight.tokens, ROWS)
        ],
        dim=1,
    )


def attend_tile(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, *, sight: Sight, first: int
) -> Tensor:
    """Outputs of ROWS tokens from the first one."""
    last = min(first + ROWS, sight.tokens)
    lowest, visible = sight.mask(first, last)
    seen = slice(lowest, sight.rows - sight.tokens + last)
    return attend(q[:, first:last], k[:, seen], v[:, seen], visible)


def again(tile: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run a tile; a backward runs it once more, for else it would keep its mask until then."""
    if not torch.is_grad_enabled():
        return tile(q, k, v)
    # Where it is needed: it loads the compiler.
    from torch.utils.checkpoint import checkpoint

    o: Tensor = checkpoint(tile, q, k, v, use_reentrant=False, preserve_rng_state=False)
    return o


@constant_when_compiled
def has_flash(device: int | None) -> bool:
    """Whether PyTorch's flash attention runs there."""
    built = torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(device)[0] >= 8


def takes_offsets(q: Tensor, v: Tensor) -> bool:
    """Whether flash attention can take packed tokens [1, T, heads, D]."""
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    channels, transforms = q.shape[-1], torch._C._are_functorch_transforms_active()
    if transforms or v.shape[-1] != channels or channels % 8 or channels > MAX_FLASH_CHANNELS:
        return False
    return q.shape[1] > 0 and has_flash(q.device.index)


def flash(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float | None) -> Tensor:
    """Each packed sequence by itself; that none is longer than the row is all that it is told."""
    offsets, tokens = cu_seqlens.to(q.device, torch.int32), q.shape[1]
    given = (x[0].contiguous() for x in (q, k, v))
    o: Tensor = torch.ops.aten._flash_attention_forward(
        *given, offsets, offsets, tokens, tokens, 0.0, True, False, scale=scale
    )[0]
    return o.unsqueeze(0)
