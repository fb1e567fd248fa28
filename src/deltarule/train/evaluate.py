"""Bits per byte of a byte-level model, over whole documents that never see each other."""

import lzma
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltarule.models import CausalLM
from deltarule.models.bytes import BEGIN
from deltarule.train.data import Batch, Corpus, rows_in_order
from deltarule.train.progress import followed


def compressed_bits_per_byte(corpus: Corpus) -> dict[str, float]:
    """Bits per byte of gzip and xz at their strongest, on all documents as one stream.

    That favours the compressors, which may look back from one document into those before it.
    Nothing of tokens that are not bytes.
    """
    if corpus.text_bytes is not None:
        return {}
    tokens = corpus.tokens[0 : len(corpus.tokens)]
    text = tokens[tokens != BEGIN].astype("uint8").tobytes()
    # With the header of a gzip file.
    tools: dict[str, Any] = {
        "gzip": zlib.compressobj(level=9, wbits=31),
        "xz": lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME),
    }
    bits = {}
    for name, tool in tools.items():
        blocks = (text[at : at + BLOCK] for at in range(0, len(text), BLOCK))
        size = 0
        for block in followed(blocks, len(text), len, name):
            size += len(tool.compress(block))
        bits[name] = 8 * (size + len(tool.flush())) / len(text)
    return bits


# Tokens in a forward pass, unless one piece is longer, and bytes that are compressed at a time.
ROW_TOKENS, BLOCK = 8192, 2**17


class PositionBin(NamedTuple):
    """Mean bits per byte at positions first to last of a piece, from 1, and how many bytes."""

    first: int
    last: int
    bits_per_byte: float
    num_bytes: int


def bits_per_byte(
    model: CausalLM, corpus: Corpus, length: int, *, every: int = 1, what: str | None = None
) -> float:
    r"""Mean bits that the model needs for a byte.

    .. math::
        -\frac{1}{n} \sum_t \log_2 p(\mathrm{byte}_t \mid \mathrm{piece\ up\ to\ } t)

    Documents are cut into pieces of at most `length` tokens, each read from an empty state; every
    byte is predicted once, whatever the length.

    Args:
        model: A model of byte tokens, on any device.
        corpus: The documents, of at least one byte.
        length: The most tokens in a piece.
        every: Read only every n-th piece: a fair sample of the whole.
        what: The name of a bar that shows how far it has come. None: no bar.

    Returns:
        Bits per byte.

    Raises:
        ValueError: The corpus is empty, or `every` is below 1.

    Examples:
        >>> from deltarule.models import ModelConfig
        >>> from deltarule.train.data import encode_documents
        >>> model = CausalLM(ModelConfig(vocab_size=257, hidden_size=16, num_layers=1,
        ...                              num_heads=1, layer_types="gated_deltanet"))
        >>> 7 < bits_per_byte(model, encode_documents([b"some text"]), 8) < 9
        True
    """
    if every < 1:
        raise ValueError(f"every must be 1 or more, got {every}")
    return mean_bits(bits_by_position(model, corpus, length, every=every, what=what))


def bits_by_position(
    model: CausalLM, corpus: Corpus, length: int, *, every: int = 1, what: str | None = None
) -> list[PositionBin]:
    """Bits per byte by the position in a piece, in bins 1, 2, 3-4, 5-8 and so on.

    Position p is a byte predicted from p tokens: with memory that helps, later bins are lower.

    Args:
        model: A model of byte tokens, on any device.
        corpus: The documents, of at least one byte.
        length: The most tokens in a piece.
        every: As of `bits_per_byte`.
        what: As of `bits_per_byte`.

    Returns:
        The bins that hold any byte, in order.

    Raises:
        ValueError: The corpus is empty.
    """
    if corpus.predicted == 0:
        raise ValueError("corpus must hold at least one byte to predict, got none")
    edges = bin_edges(length)
    sums = torch.zeros(len(edges), dtype=torch.float64)
    counts = torch.zeros(len(edges), dtype=torch.int64)
    bounds = torch.tensor([last for _, last in edges])
    of_bytes = corpus.predicted / corpus.num_bytes / math.log(2)
    for batch, losses in token_losses(model, corpus, length, every, what):
        starts = batch.cu_seqlens[:-1].repeat_interleave(batch.cu_seqlens.diff())
        positions = torch.arange(len(losses)) - starts + 1
        where = torch.bucketize(positions, bounds)
        sums += torch.zeros_like(sums).index_add_(0, where, losses)
        counts += torch.bincount(where, minlength=len(edges))
    return [
        PositionBin(first, last, float(total) * of_bytes / int(count), int(count))
        for (first, last), total, count in zip(edges, sums, counts, strict=True)
        if count
    ]


def mean_bits(bins: Sequence[PositionBin]) -> float:
    """What `bits_per_byte` gives, from the bins of `bits_by_position`."""
    return sum(b.bits_per_byte * b.num_bytes for b in bins) / sum(b.num_bytes for b in bins)


@torch.no_grad()
def token_losses(
    model: CausalLM, corpus: Corpus, length: int, every: int, what: str | None
) -> Iterator[tuple[Batch, Tensor]]:
    """Rows of pieces, each with its losses [T] in nats, in float64 on the CPU."""
    device = model.embedding.weight.device
    rows = rows_in_order(corpus, length, max(length, ROW_TOKENS), every=every)
    for batch in followed(rows, corpus.predicted // every, lambda x: x.tokens.numel(), what):
        tokens, targets, cu_seqlens = (x.to(device, non_blocking=True) for x in batch)
        logits, _ = model(tokens, cu_seqlens=cu_seqlens)
        losses = F.cross_entropy(logits[0].float(), targets[0], reduction="none")
        yield batch, losses.cpu().double()


def bin_edges(length: int) -> list[tuple[int, int]]:
    """First and last position of each bin: powers of two, the last bin cut off at the length."""
    lasts = [2**i for i in range((length - 1).bit_length())] + [length]
    firsts = [1, *(last + 1 for last in lasts[:-1])]
    return list(zip(firsts, lasts, strict=True))
