"""How the tokens of one call lie in rows, computed once for all layers of a model.

Padding:  each row's real tokens are moved to its front, so that whatever looks back (convolution,
          token shift, positions, attention) sees only real tokens, and are moved back at the end.
Packing:  the sequences lie end to end in one row, and each looks back into its own history.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import is_not
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from deltarule.ops.checks import check_axes, check_dense
from deltarule.ops.context import Context, check_context
from deltarule.ops.context.rows import rows_before
from deltarule.ops.history import last_rows, sequence_of, token_rows, with_history
from deltarule.ops.pack import check_cu_seqlens
from deltarule.shapes import Hidden, Mask, Offsets

# What tells of a mask that real tokens come first in each row, so that none is moved.
IN_FRONT = "in_front"
# Where the first layer of a pass leaves its layout, with what it was made of.
SHARED = "layout"
# What a linear rule writes, erases and decays with; the first three have a row for each write.
WRITES = ("k", "v", "beta", "log_decay", "a", "b")
EACH_STEP = WRITES[:3]


@dataclass(frozen=True)
class Layout:
    """Rows and sequences of one call; build it with `make_layout`.

    Args:
        batch: Rows.
        tokens: Tokens in a row, padding included.
        device: Where the tokens are.
        real_counts: [N] real tokens of each sequence. None: all of its tokens.
        cu_seqlens: Offsets [N + 1] of packed sequences, on that device. None: a row is a sequence.
        sequence: [T] the packed sequence that each token belongs to. None: a row is a sequence.
        order: [B, T] the tokens of each row, real ones first. None: all are real.
        place: [B, T] where `order` has put each token. None: all are real.
        real: [B, T] True at the real tokens, once they are at the front. None: all are real.
        context: The processes that hold other tokens of these sequences. None: there are none.
    """

    batch: int
    tokens: int
    device: torch.device
    real_counts: Tensor | None = None
    cu_seqlens: Tensor | None = None
    sequence: Tensor | None = None
    order: Tensor | None = None
    place: Tensor | None = None
    real: Tensor | None = None
    context: Context | None = None

    @property
    def sequences(self) -> int:
        """N: rows, or packed sequences."""
        return self.batch if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def counts(self) -> Tensor:
        """[N] real tokens of each sequence; made where it is asked for, which few layers do."""
        if self.real_counts is not None:
            return self.real_counts
        return torch.full((self.batch,), self.tokens, device=self.device)

    @property
    def spans(self) -> dict[str, Any]:
        """What an operator is told of the sequences' ends."""
        if self.context is None:
            return {"cu_seqlens": self.cu_seqlens}
        return {"context": self.context}

    @property
    def ends(self) -> dict[str, Any]:
        """The same bounds for an operator that takes padding and no context."""
        lengths = None if self.real is None else self.counts
        return {"lengths": lengths, "cu_seqlens": self.cu_seqlens}

    def history(self, x: Tensor, given: Tensor) -> Tensor:
        """[N, R, D] what comes before each sequence of x here: as given, or on other processes."""
        if self.context is None:
            return given
        return rows_before(self.context, x, given.shape[1], given)

    def lengths(self, given: Tensor) -> Tensor:
        """[N] tokens of each sequence before those here."""
        if self.context is None or not self.context.goes_on:
            return given
        first = torch.arange(len(given), device=given.device) < self.batch
        return torch.where(first, self.context.position, given)

    def to_front(self, x: Tensor) -> Tensor:
        """Move each row's real tokens to its front and zero the rest: [B, T, D] -> [B, T, D]."""
        if self.order is None or self.real is None:
            return x
        moved = torch.take_along_dim(x, self.order.unsqueeze(-1), dim=1)
        return torch.where(self.real.unsqueeze(-1), moved, 0)

    def to_place(self, y: Tensor) -> Tensor:
        if self.place is None:
            return y
        return torch.take_along_dim(y, self.place.unsqueeze(-1), dim=1)

    def positions(self, start: Tensor) -> Tensor:
        """[B, T] each token's position in its sequence, which had start [N] tokens before."""
        token = torch.arange(self.tokens, device=self.device)
        if self.cu_seqlens is None or self.sequence is None:
            return start.unsqueeze(1) + token
        return (start - self.cu_seqlens[:-1])[self.sequence].add(token).unsqueeze(0)

    def with_history(self, x: Tensor, history: Tensor) -> Tensor:
        """Put before each sequence its own last inputs [N, R, D].

        Unpacked: [B, R + T, D]. Packed: [1, T + N R, D], each sequence after its history.
        """
        return with_history(x, history, self.cu_seqlens, self.sequence)

    def without_history(self, y: Tensor, reach: int) -> Tensor:
        """Pick the tokens from what was computed on rows r..r + reach of `with_history`."""
        if self.sequence is None:
            return y
        return y.index_select(1, token_rows(self.sequence, reach) - reach)

    def next_history(self, x: Tensor, history: Tensor) -> Tensor:
        """[N, R, D] the last inputs of each sequence, those of its history where it is shorter."""
        return last_rows(x, history, **self.ends)

    def one_back(self, x: Tensor, before: Tensor) -> Tensor:
        """x_{t-1} [B, T, D] within each sequence, with before [N, 1, D] at its first token."""
        return self.without_history(self.with_history(x, before)[:, :-1], 1)


def make_layout(
    x: Hidden, cu_seqlens: Offsets | None, mask: Mask | None, context: Context | None = None
) -> Layout:
    """Check the arguments that every layer shares, and work out where its tokens lie."""
    check_axes("x", x, "[B, T, hidden_size]", 3)
    if context is not None:
        if mask is not None:
            raise ValueError("mask must be None with a context, which knows no padding")
        check_context(context, x.shape[1], "x", cu_seqlens)
        return replace(make_layout(x, context.cu_seqlens(x.device), None), context=context)
    if cu_seqlens is not None:
        if mask is not None:
            raise ValueError("mask must be None with cu_seqlens: leave padding out of the packing")
        return _packed(x, cu_seqlens)
    if mask is not None:
        return _padded(x, mask)
    batch, tokens, _ = x.shape
    return Layout(batch, tokens, x.device)


def _packed(x: Hidden, cu_seqlens: Offsets) -> Layout:
    check_cu_seqlens(cu_seqlens, x)
    cu_seqlens = cu_seqlens.to(x.device, torch.int64)
    sequence, counts = sequence_of(cu_seqlens, x.shape[1]), cu_seqlens.diff()
    return Layout(1, x.shape[1], x.device, counts, cu_seqlens=cu_seqlens, sequence=sequence)


def front_mask(lengths: Tensor, tokens: int) -> Mask:
    """The mask [B, T] of rows that begin with so many real tokens [B]."""
    mask = torch.arange(tokens, device=lengths.device) < lengths.unsqueeze(1)
    setattr(mask, IN_FRONT, True)
    return mask


def check_mask(mask: Mask, x: Tensor, name: str) -> None:
    """Refuse what does not tell of each token of x [B, T, ...] whether it is real."""
    check_dense("mask", mask, " or None")
    if mask.dtype != torch.bool or mask.shape != x.shape[:2]:
        raise ValueError(
            f"mask must be a bool tensor [B, T] = {list(x.shape[:2])}, True at real tokens, "
            f"got {mask.dtype} {list(mask.shape)}"
        )
    if mask.device != x.device:
        raise ValueError(f"mask is on {mask.device}, but {name} is on {x.device}")


def _padded(x: Hidden, mask: Mask) -> Layout:
    check_mask(mask, x, "x")
    batch, tokens, _ = x.shape
    counts = mask.sum(dim=1)
    if getattr(mask, IN_FRONT, False):
        return Layout(batch, tokens, x.device, counts, real=mask)
    order = (~mask).byte().argsort(dim=1, stable=True)
    real = torch.arange(tokens, device=x.device) < counts.unsqueeze(1)
    place = order.argsort(dim=1)
    return Layout(batch, tokens, x.device, counts, order=order, place=place, real=real)


def shared_layout(
    x: Hidden,
    cu_seqlens: Offsets | None,
    mask: Mask | None,
    context: Context | None,
    shared: dict[str, Any],
) -> Layout:
    """`make_layout`, once for all layers of a pass that are given the same tensors."""
    given = cu_seqlens, mask, context
    if torch.compiler.is_compiling():
        return make_layout(x, *given)
    before, layout = shared.get(SHARED, ((), None))
    same = layout is not None and not any(map(is_not, given, before))
    if not same or (layout.batch, layout.tokens, layout.device) != (*x.shape[:2], x.device):
        layout = make_layout(x, *given)
        shared[SHARED] = given, layout
    return layout


def silence_padding(
    arguments: dict[str, Any], real: Tensor | None, names: Sequence[str] = WRITES, n_steps: int = 1
) -> dict[str, Any]:
    """Put zeros at padding into the named arguments: no write, no erase, no decay.

    These have a row for each token, of k, v and beta n_steps of them, or are a constant decay
    [HV]; `real` [B, T] is True at real tokens, None where all are.
    """
    if real is None:
        return arguments
    silent = dict(arguments)
    for name in names:
        if isinstance(x := arguments.get(name), Tensor):
            if x.ndim == 1:
                # A constant decay has to differ between tokens now.
                x = x.expand(*real.shape, -1)
            each = name in EACH_STEP and n_steps > 1
            kept = real.repeat_interleave(n_steps, dim=1) if each else real
            silent[name] = torch.where(kept[(...,) + (None,) * (x.ndim - 2)], x, 0)
    return silent


def split(x: Tensor, *sizes: int) -> Tensor:
    """[..., product of sizes] -> `[..., *sizes]`."""
    return x if x.shape[-1:] == sizes else x.reshape(*x.shape[:-1], *sizes)


def per_step(x: Tensor, n_steps: int, *sizes: int) -> Tensor:
    """`[B, T, n * S]` -> `[B, T * n, *sizes]`: row t * n + j is the j-th part of token t."""
    batch, tokens, channels = x.shape
    sizes = sizes or (channels // n_steps,)
    return split(x, *sizes) if n_steps == 1 else x.reshape(batch, tokens * n_steps, *sizes)


def in_rows(x: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """[N, L, D] and the layout of documents as rows, padded behind; L is the longest's length."""
    if layout.cu_seqlens is None:
        return x, layout
    # To a compiler any document may be as long as all together.
    unknown = torch.compiler.is_compiling() or isinstance(layout.counts, FakeTensor)
    unknown = unknown or layout.counts.is_meta or not layout.sequences
    tokens = layout.tokens if unknown else int(layout.counts.max())
    token = torch.arange(tokens, device=x.device)
    real = token < layout.counts.unsqueeze(1)
    place = (layout.cu_seqlens[:-1, None] + token).clamp(max=max(layout.tokens - 1, 0))
    rows = x[0, place].masked_fill(~real.unsqueeze(-1), 0)
    alone = replace(
        layout, batch=len(real), tokens=tokens, cu_seqlens=None, sequence=None, real=real
    )
    return rows, alone


def by_token(y: Tensor, layout: Layout) -> Tensor:
    """Lay rows [N, L, D] out as the tokens were: [B, T, D]."""
    if layout.cu_seqlens is None or layout.sequence is None:
        return y
    token = torch.arange(layout.tokens, device=y.device)
    return y[layout.sequence, token - layout.cu_seqlens[layout.sequence]].unsqueeze(0)
