"""Documents as byte tokens, cut into pieces and packed into rows that never mix documents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from deltarule.models.bytes import BEGIN
from deltarule.nn.checks import check_that
from deltarule.ops import pack

Array = NDArray[np.int64]


class Batch(NamedTuple):
    """One row of packed pieces: `targets[0, i]` is the byte after `tokens[0, i]`."""

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor


class FileTokens:
    """Tokens of documents that stay in their files: made from the bytes as slices are asked for.

    In the tokens each document begins at one of the bounds; the last bound is their end.

    Examples:
        >>> FileTokens([b"ab", b"c"], np.array([0, 3, 5]))[1:4].tolist()
        [97, 98, 256]
    """

    def __init__(self, texts: Sequence[bytes | memoryview], bounds: Array) -> None:
        self.texts, self.bounds = texts, bounds

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getitem__(self, span: slice) -> NDArray[np.uint16]:
        start, stop, _ = span.indices(len(self))
        tokens = np.full(max(0, stop - start), BEGIN, dtype=np.uint16)
        first = int(np.searchsorted(self.bounds, start, side="right")) - 1
        for text, begin in zip(self.texts[first:], self.bounds[first:], strict=False):
            if begin >= stop:
                break
            # The bytes come after BEGIN.
            bytes_at = int(begin) + 1
            part = np.frombuffer(text, np.uint8)[max(0, start - bytes_at) : stop - bytes_at]
            place = max(bytes_at, start) - start
            tokens[place : place + len(part)] = part
        return tokens


@dataclass(frozen=True)
class Corpus:
    """Documents end to end, each BEGIN and its bytes; i is tokens[bounds[i]:bounds[i+1]].

    Of a tokenizer, each its first token and those of its text, which was `text_bytes` long.
    """

    tokens: Any
    """An array in memory, or mapped from files, of which parts of one document are read."""
    bounds: Array
    text_bytes: int | None = None

    @property
    def predicted(self) -> int:
        """Tokens to predict: all but the first of each document."""
        return len(self.tokens) - (len(self.bounds) - 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of the text; without a tokenizer, a token to predict is one."""
        return self.predicted if self.text_bytes is None else self.text_bytes


def joined(parts: Sequence[NDArray[Any]], text_bytes: int) -> Corpus:
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return Corpus(tokens, np.cumsum([0, *map(len, parts)], dtype=np.int64), text_bytes)


def taken(sizes: ArrayLike, largest: int) -> Array:
    """How much of each to take, in turn, for so much of all.

    None gives more than a sixteenth, where there are as many: one long one would speak for all.
    """
    sizes = np.asarray(sizes, np.int64)
    each = np.minimum(sizes, max(1, largest // max(1, min(16, len(sizes)))))
    return np.clip(largest - (np.cumsum(each) - each), 0, each)


class Spans(NamedTuple):
    """Where pieces start in a corpus, and how many tokens each predicts from; nothing is read."""

    starts: Array
    lengths: Array


def encode_documents(texts: Sequence[bytes | memoryview]) -> Corpus:
    """Turn documents into one array of tokens; empty ones vanish.

    Where one of them is mapped from a file, all stay where they are, and slices of the tokens are
    made as they are read.
    """
    texts = [text for text in texts if text]
    bounds = np.cumsum([0, *(len(text) + 1 for text in texts)], dtype=np.int64)
    tokens = FileTokens(texts, bounds)
    mapped = any(isinstance(text, memoryview) for text in texts)
    return Corpus(tokens if mapped else tokens[:], bounds)


def cut(corpus: Corpus, length: int, rng: np.random.Generator | None = None) -> Spans:
    """Cut every document into pieces of at most `length` tokens; every byte is predicted once.

    A piece of n tokens carries n + 1 bytes: what it reads, and the byte after each. With `rng` the
    first piece of a document longer than `length` is shorter, so that the cuts fall elsewhere in
    each epoch; without, only the last may be.
    """
    check_that(length >= 1, "length must be 1 or more", length)
    bounds = np.asarray(corpus.bounds)
    predicted = np.diff(bounds) - 1
    first = np.full(len(predicted), length)
    if rng is not None:
        long = predicted > length
        first[long] = rng.integers(1, length + 1, size=int(long.sum()))
    counts = np.maximum(1, 1 - (first - predicted) // length)
    document = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    # All but a document's first piece start where that and whole ones have ended.
    starts = np.where(place == 0, 0, first[document] + (place - 1) * length)
    # A document's last token is only ever a target, so its last piece ends one token early.
    ends = np.minimum(first[document] + place * length, predicted[document])
    return Spans(bounds[document] + starts, ends - starts)


def row(corpus: Corpus, starts: Array, lengths: Array) -> Batch:
    """Lay pieces end to end in one row."""
    sizes = lengths.tolist()
    read = [corpus.tokens[s : s + n + 1] for s, n in zip(starts.tolist(), sizes, strict=True)]
    tokens = np.concatenate([tokens[:-1] for tokens in read], dtype=np.int64)
    targets = np.concatenate([tokens[1:] for tokens in read], dtype=np.int64)
    return Batch(torch.from_numpy(tokens)[None], torch.from_numpy(targets)[None], pack(sizes))


def rows_in_order(
    corpus: Corpus, length: int, row_tokens: int, *, every: int = 1
) -> Iterator[Batch]:
    """Every piece, or every n-th, in the order of the text, as many to a row as fit whole."""
    starts, lengths = (x[::every] for x in cut(corpus, length))
    first, held = 0, 0
    for i, n in enumerate(lengths.tolist()):
        if held and held + n > row_tokens:
            yield row(corpus, starts[first:i], lengths[first:i])
            first, held = i, 0
        held += n
    if held:
        yield row(corpus, starts[first:], lengths[first:])


def with_empty_pieces(cu_seqlens: Tensor) -> Tensor:
    """Add empty pieces at the end, to a power of two of 16 or more: few different numbers occur.

    Examples:
        >>> [len(with_empty_pieces(torch.arange(n))) for n in (3, 17, 18, 40)]
        [17, 17, 33, 65]
    """
    pieces = max(16, 1 << (len(cu_seqlens) - 2).bit_length())
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(pieces + 1 - len(cu_seqlens))])


class ShuffledRows:
    """An endless, repeatable stream of full rows of shuffled pieces.

    Each epoch's cuts and order are a function of the seed and the epoch; the position (epoch,
    piece, tokens taken of that piece) is all that a resumed run needs.

    Args:
        corpus: The documents.
        length: The most tokens in a piece.
        row_tokens: Tokens in every row. The piece that does not fit goes on in the next row.
        seed: Decides the cuts and the order.

    Raises:
        ValueError: A size is below 1, or the corpus is empty.

    Examples:
        >>> rows = ShuffledRows(encode_documents([b"abcdefgh"]), length=3, row_tokens=5, seed=0)
        >>> rows.next().tokens.shape
        torch.Size([1, 5])
    """

    def __init__(self, corpus: Corpus, *, length: int, row_tokens: int, seed: int) -> None:
        check_that(row_tokens >= 1, "row_tokens must be 1 or more", row_tokens)
        if corpus.predicted < 1:
            raise ValueError("corpus must hold at least one byte, got none")
        self.corpus, self.length, self.row_tokens, self.seed = corpus, length, row_tokens, seed
        self._start_epoch(0)

    def _start_epoch(self, epoch: int) -> None:
        rng = np.random.default_rng((self.seed, epoch))
        pieces = cut(self.corpus, self.length, rng)
        order = rng.permutation(len(pieces.starts))
        self._pieces = Spans(pieces.starts[order], pieces.lengths[order])
        self.epoch, self.piece, self.taken = epoch, 0, 0

    def next(self) -> Batch:
        """The next row; the position moves past it."""
        return row(self.corpus, *self.spans())

    def spans(self) -> Spans:
        """Places of the next row's pieces; the position moves past them, and nothing is read."""
        starts, lengths, room = [], [], self.row_tokens
        while room:
            if self.piece == len(self._pieces.starts):
                self._start_epoch(self.epoch + 1)
            left = int(self._pieces.lengths[self.piece]) - self.taken
            n = min(left, room)
            starts.append(int(self._pieces.starts[self.piece]) + self.taken)
            lengths.append(n)
            room -= n
            self.taken += n
            if n == left:
                self.piece, self.taken = self.piece + 1, 0
        return Spans(np.array(starts), np.array(lengths))

    def position(self) -> dict[str, int]:
        return {"epoch": self.epoch, "piece": self.piece, "taken": self.taken}

    def seek(self, position: dict[str, int]) -> None:
        self._start_epoch(position["epoch"])
        piece, taken = position["piece"], position["taken"]
        inside = 0 <= piece < len(self._pieces.lengths) and 0 <= taken < self._pieces.lengths[piece]
        if not inside and (piece, taken) != (len(self._pieces.lengths), 0):
            raise ValueError(f"position {position} lies outside the data: is it another corpus?")
        self.piece, self.taken = piece, taken
