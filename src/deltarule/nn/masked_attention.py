"""Softmax attention of tokens that do not see all before them, without a mask of T x T.

Rows of queries at a time, each with a mask of its own that is made where it is used and, for the
backward, made again. Packed tokens in 16 bits on a GPU go to flash attention, which takes offsets.

A window that begins with the call is read in blocks of its own size: a block sees itself and the
block before it, so that T tokens take 2 T window scores.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.nn.layout import Layout
from deltarule.nn.state import LentState, State
from deltarule.ops.context import Context
from deltarule.ops.dispatch import constant_when_compiled
from deltarule.ops.history import sequence_of

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

    def tile(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        last = min(first + ROWS, sight.tokens)
        lowest, visible = sight.mask(first, last)
        seen = slice(lowest, sight.rows - sight.tokens + last)
        return attend(q[:, first:last], k[:, seen], v[:, seen], visible)

    run: Callable[..., Tensor] = tile
    if torch.is_grad_enabled():
        # Where it is needed: it loads the compiler. A backward runs a tile again, so that its mask
        # need not be kept until then.
        from torch.utils.checkpoint import checkpoint

        run = partial(checkpoint, tile, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([run(q, k, v, first) for first in range(0, sight.tokens, ROWS)], dim=1)


@constant_when_compiled
def has_flash(device: int | None) -> bool:
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
    """Each packed sequence by itself; all that is said of lengths is that the row's is the most."""
    offsets, tokens = cu_seqlens.to(q.device, torch.int32), q.shape[1]
    given = (x[0].contiguous() for x in (q, k, v))
    o: Tensor = torch.ops.aten._flash_attention_forward(
        *given, offsets, offsets, tokens, tokens, 0.0, True, False, scale=scale
    )[0]
    return o.unsqueeze(0)


def attend_in_blocks(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, size: int, sequence: Tensor | None
) -> Tensor:
    """Softmax attention of tokens [B, T, heads, D] with nothing before them, over a window.

    `attend` takes q, k and v with a mask; `sequence` [T] is that of packed tokens, else None.
    """
    tokens, heads = q.shape[1:3]
    if k.shape[2] != heads:
        # PyTorch's kernels for grouped heads take no mask.
        k, v = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))
    q, k, v = (blocks(x, size) for x in (q, k, v))
    column = torch.arange(-size, size, device=q.device)
    behind = column[size:].unsqueeze(1) - column
    # What the first block sees of itself, None for plain causal, and others of two blocks.
    first, others = None, ((behind >= 0) & (behind < size))[None, None]
    if sequence is not None:
        own = blocks(sequence[None], size)
        first = (own[:, :1].unsqueeze(3) == own[:, :1].unsqueeze(2)).tril()
        same = own[:, 1:].unsqueeze(3) == with_block_before(own).unsqueeze(2)
        others = others & same.transpose(0, 1)
    o = attend(q[:, 0], k[:, 0], v[:, 0], first)
    rows_and_blocks = q[:, 1:].shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q[:, 1:], with_block_before(k), with_block_before(v)))
    after = attend(q, k, v, others).unflatten(0, rows_and_blocks).flatten(1, 2)
    return torch.cat([o, after], dim=1)[:, :tokens]


def blocks(x: Tensor, size: int) -> Tensor:
    """Cut rows [B, T, ...] into blocks [B, N, size, ...]; zeros behind the last token fill up."""
    fill = x.new_zeros(len(x), -x.shape[1] % size, *x.shape[2:])
    return torch.cat([x, fill], dim=1).unflatten(1, (-1, size))


def with_block_before(x: Tensor) -> Tensor:
    """Put each block but the first behind the one before: [B, N - 1, 2 size, ...]."""
    return torch.cat([x[:, :-1], x[:, 1:]], dim=2)


def visible_up_to(
    context: Context, window: int | None, device: torch.device
) -> tuple[int, Tensor | None]:
    """The first row that any row of one process sees, and which of those from it on each sees.

    None in place of the second where causal from the last row on is all there is to say.
    """
    if window is None and context.offsets is None:
        return 0, None
    document, start = None, 0
    if context.offsets is not None:
        document = sequence_of(torch.tensor(context.offsets, device=device), context.last)
        start = context.first - context.position
    sight = Sight(context.last, context.last, device, window, document)
    lowest, visible = sight.mask(context.first, context.last)
    first = max(lowest, start)
    return first, visible[..., first - lowest :]


def continued(
    before: State, keys: Tensor, values: Tensor, layout: Layout, window: int | None
) -> State:
    """The state with a call's rows appended, real rows last, less what no window reaches."""
    new = torch.ones_like(keys[:, before["keys"].shape[1] :, 0, 0], dtype=torch.bool)
    valid = torch.cat([before["valid"], new if layout.real is None else layout.real], dim=1)
    if layout.real is not None:
        # Real rows last, so that distances in rows are distances in tokens.
        order = valid.byte().argsort(dim=1, stable=True)
        valid = valid.gather(1, order)
        index = order[..., None, None]
        keys, values = (torch.take_along_dim(rows, index, dim=1) for rows in (keys, values))
    if window is not None:
        first = max(0, keys.shape[1] - window + 1)
        keys, values, valid = (rows[:, first:].clone() for rows in (keys, values, valid))
    length = before["length"] + layout.counts
    return State(keys=keys, values=values, valid=valid, length=length)


def add_row(k: Tensor, v: Tensor, state: LentState) -> Tensor:
    """Write one token of each row into the cache; return [B, L], which of its rows have one."""
    place, valid = state["place"], state["valid"]
    at = torch.arange(len(place), device=place.device), place
    for name, new in (("keys", k), ("values", v)):
        state[name].index_put_(at, new.to(state[name].dtype))
    valid.index_put_(at, torch.ones_like(place, dtype=torch.bool))
    state["length"].add_(1)
    place.add_(1).remainder_(valid.shape[1])
    return valid
