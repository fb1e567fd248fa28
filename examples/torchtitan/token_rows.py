"""The token shards of `deltarule data` as torchtitan's data: packed rows, and no text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from deltarule.train.data import ShuffledRows, row
from deltarule.train.token_shards import open_token_folder


class Rows(BaseDataLoader):
    """Rows dealt to the data-parallel ranks; the position is the same on all, for any number."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Where the shards are, and the most tokens of a document in a piece."""

        data: str = "tokens"
        length: int = 4096

        def vocab_size(self) -> int:
            """Tokens of the vocabulary."""
            return open_token_folder(self.data).index.vocab_size

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int,
        local_batch_size: int, **_: Any,
    ) -> None:  # fmt: skip
        """Start at the first row."""
        corpus = open_token_folder(config.data).training
        self.rows = ShuffledRows(corpus, length=config.length, row_tokens=seq_len, seed=0)
        self.rank, self.size, self.batch = dp_rank, dp_world_size, local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Batches of this process: `input`, `positions` within documents, and targets."""
        while True:
            dealt = [self.rows.spans() for _ in range(self.batch * self.size)]
            rows = [row(self.rows.corpus, *spans) for spans in dealt[self.rank :: self.size]]
            places = [torch.cat([*map(torch.arange, r.cu_seqlens.diff().tolist())]) for r in rows]
            tokens, targets = (torch.cat([r[i] for r in rows]) for i in (0, 1))
            yield {"input": tokens, "positions": torch.stack(places)}, targets

    def state_dict(self) -> dict[str, Any]:
        """Where the next row starts."""
        return self.rows.position()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        self.rows.seek(state)


class NoText(BaseTokenizer):
    """What torchtitan asks for and never uses: the shards hold tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing."""

    def __init__(self, config: Config, *, tokenizer_path: str = "") -> None:
        """Nothing."""
        super().__init__()

    def encode(self, *given: Any, **options: Any) -> list[int]:
        """Refuse."""
        raise NotImplementedError("the shards hold tokens: deltarule data makes them of text")

    decode = encode

    def get_vocab_size(self) -> int:
        """Unknown here."""
        return 0
