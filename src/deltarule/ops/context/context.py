"""Where the tokens of one sequence, or of one row of documents, lie among several processes."""

import itertools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Exchange = Literal["auto", "gather", "scan"]
# Up to here one collective is faster than a few rounds of messages.
MOST_GATHERED = 64


class Context(NamedTuple):
    """The part of a row of T tokens that one process holds; build it with `make_context`.

    Args:
        group: The processes that share the row, in the order of its tokens.
        rank: Of this process among them.
        bounds: Where the tokens of each process begin, and T.
        offsets: Where each document of the row begins, and T. None: each row is one sequence.
        exchange: "gather" sends every state to everybody at once, "scan" reaches twice as far in
            every round of messages; "auto" gathers among up to 64 processes.
        meanwhile: A function that every operator calls while its states are sent. The work that
            it does, and its gradients, fill time in which the operator has to wait.
    """

    group: dist.ProcessGroup
    rank: int
    bounds: tuple[int, ...]
    offsets: tuple[int, ...] | None = None
    exchange: Exchange = "auto"
    meanwhile: Callable[[], None] | None = None

    @property
    def alone(self) -> "Context":
        """For what a graph keeps: `meanwhile` knows the caller, whose tensors keep the graph."""
        return self._replace(meanwhile=None)

    @property
    def size(self) -> int:
        """Processes that share the row."""
        return len(self.bounds) - 1

    @property
    def first(self) -> int:
        return self.bounds[self.rank]

    @property
    def last(self) -> int:
        """The token after the last one here."""
        return self.bounds[self.rank + 1]

    @property
    def starts(self) -> list[int]:
        """First tokens of the documents here."""
        return sorted({o for o in self.offsets or () if self.first <= o < self.last})

    @property
    def goes_on(self) -> bool:
        """Whether the first token here continues a sequence of the process before."""
        return self.rank > 0 and self.first not in self.starts

    @property
    def tail(self) -> int:
        """The first token here, counted from 0, of the sequence that the last token is in."""
        return max(self.starts, default=self.first) - self.first

    @property
    def before(self) -> range:
        """The processes before this one that hold tokens of the first sequence here."""
        start = self.first - self.position
        holding = [rank for rank in range(self.rank) if self.bounds[rank + 1] > start]
        return range(holding[0], self.rank) if holding and self.goes_on else range(0)

    @property
    def gathers(self) -> bool:
        """Whether states go to everybody in one collective."""
        if self.exchange == "auto":
            return self.size <= MOST_GATHERED
        return self.exchange == "gather"

    def part(self, x: Tensor) -> Tensor:
        """The tokens here of a whole row, x [B, T, ...]: a view."""
        return x[:, self.first : self.last]

    def cu_seqlens(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Offsets of the sequences here; the first may have begun before. None: not packed."""
        return None if self.offsets is None else torch.tensor(self.edges, device=device)

    @property
    def edges(self) -> list[int]:
        """The bounds as Python numbers."""
        return [edge - self.first for edge in sorted({self.first, *self.starts, self.last})]

    @property
    def sequences(self) -> int | None:
        """How many sequences are here: None where each row is one."""
        return None if self.offsets is None else len({self.first, *self.starts})

    @property
    def position(self) -> int:
        """How many tokens of the first sequence here lie on the processes before."""
        if not self.goes_on:
            return 0
        return self.first - max((o for o in self.offsets or (0,) if o <= self.first), default=0)


def check_context(context: Context, tokens: int, name: str, offsets: Tensor | None = None) -> None:
    """Refuse a tensor that does not have as many tokens as lie here, and offsets beside it."""
    if not isinstance(context, Context):
        kind = type(context).__name__
        raise ValueError(f"context must be what make_context returns, or None, got {kind}")
    if offsets is not None:
        raise ValueError("cu_seqlens must be None with a context: make_context takes the offsets")
    if tokens != context.last - context.first:
        raise ValueError(
            f"{name} must have the {context.last - context.first} tokens of process "
            f"{context.rank} of the context, got {tokens}: context.part takes them from a whole row"
        )


def make_context(
    tokens: int,
    *,
    group: dist.ProcessGroup | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    bounds: Sequence[int] | None = None,
    exchange: Exchange = "auto",
) -> Context:
    """Share rows of tokens out over the processes of a group, a stretch to each.

    Every process calls it with the same numbers.

    Args:
        tokens: T, of a whole row.
        group: The processes, in the order of the tokens. None: all.
        cu_seqlens: Offsets [N + 1] of documents packed into the row, from 0 to T. None: each row is
            one sequence.
        bounds: Where each process's tokens begin, and T: any rising numbers. None: equal shares.
        exchange: How states travel; see `Context`.

    Returns:
        What this process holds. Pass it to an operator, a layer or a model, with the tokens here.

    Raises:
        ValueError: There is no group, numbers do not rise from 0 to T, or a process has no token.

    Examples:
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> make_context(10, cu_seqlens=[0, 4, 10]).cu_seqlens()
        tensor([ 0,  4, 10])
        >>> dist.destroy_process_group()
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("group can be None after init_process_group only: start with torchrun")
    size = dist.get_world_size(group)
    if bounds is None:
        bounds = [tokens * rank // size for rank in range(size + 1)]
    _check_rising("bounds", list(bounds), tokens, strictly=True)
    if len(bounds) != size + 1:
        raise ValueError(f"bounds must be {size + 1} numbers for {size} processes, got {bounds}")
    offsets = None
    if cu_seqlens is not None:
        offsets = tuple(int(offset) for offset in cu_seqlens)
        _check_rising("cu_seqlens", list(offsets), tokens, strictly=False)
    return Context(group, dist.get_rank(group), tuple(bounds), offsets, exchange)


def _check_rising(name: str, numbers: list[int], tokens: int, *, strictly: bool) -> None:
    steps = [b - a for a, b in itertools.pairwise(numbers)]
    rising = all(step > 0 if strictly else step >= 0 for step in steps)
    if not rising or numbers[:1] != [0] or numbers[-1:] != [tokens]:
        kind = "rise, a token to each process at least," if strictly else "rise"
        raise ValueError(f"{name} must {kind} from 0 to T = {tokens}, got {numbers}")
