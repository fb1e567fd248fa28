"""What a call of `generate` asks for, checked, and what its rows have come to."""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from deltarule.models.arguments import check_state
from deltarule.models.bytes import BEGIN, VOCAB_SIZE
from deltarule.models.decoder import Sampling
from deltarule.models.sampling import DAMAGED
from deltarule.nn import ModelState
from deltarule.nn.checks import check_integer
from deltarule.ops.few_tokens import MAX_TOKENS

if TYPE_CHECKING:
    from deltarule.models.causal_lm import CausalLM

Prompt = Sequence[int] | Tensor
Stop = int | Sequence[int]


@dataclass(frozen=True)
class Options:
    """The arguments of `generate` beside its prompts and their state."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    stop: Sequence[Stop]
    seed: int | None
    cuda_graphs: bool
    draft: int

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty
        )

    def check(self, vocab_size: int) -> None:
        """Refuse what cannot be meant, naming the argument."""
        check_integer("max_new_tokens", self.max_new_tokens, smallest=0)
        warm = self.temperature
        if not isinstance(warm, float | int) or not math.isfinite(warm) or warm < 0:
            raise ValueError(
                f"temperature must be a finite number of 0 or more, got {self.temperature}"
            )
        if self.top_k is not None:
            check_integer("top_k", self.top_k, smallest=1)
        for name in ("top_p", "min_p"):
            if (value := getattr(self, name)) is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must lie in (0, 1], got {value}")
        penalty = self.repetition_penalty
        if not 1e-30 <= penalty <= 1e30:
            raise ValueError(f"repetition_penalty must be a number above 0, got {penalty}")
        if penalty != 1 and self.draft:
            raise ValueError(
                f"draft must be 0 with a repetition_penalty, got {self.draft}: a guess would count "
                "as seen"
            )
        if self.seed is not None:
            check_integer("seed", self.seed, smallest=0)
            if self.seed >= 2**63:
                raise ValueError(f"seed must be below 2**63, got {self.seed}")
        check_integer("draft", self.draft, smallest=0)
        if self.draft >= MAX_TOKENS:
            raise ValueError(f"draft must be below {MAX_TOKENS}, got {self.draft}")
        if isinstance(self.stop, int | str | bytes):
            raise ValueError(
                f"stop must be a list of tokens or of token sequences, got {self.stop!r}"
            )
        for sequence in self.stop_sequences():
            if not sequence:
                raise ValueError("stop holds an empty sequence, which would end every row at once")
            _check_range("stop", sequence, vocab_size)

    def stop_sequences(self) -> list[list[int]]:
        return [_as_sequence(stop) for stop in self.stop]


def _as_sequence(stop: Stop) -> list[int]:
    try:
        return [stop] if isinstance(stop, int) else [operator.index(token) for token in stop]
    except TypeError:
        raise ValueError(f"stop must hold tokens or sequences of tokens, got {stop!r}") from None


def _check_range(name: str, tokens: list[int], vocab_size: int) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise ValueError(f"{name} must hold tokens in [0, {vocab_size}), got {wrong}")


def check_prompts(
    model: "CausalLM", prompts: Sequence[Prompt], state: ModelState | None
) -> list[list[int]]:
    """Return every prompt as a list of at least one token."""
    if isinstance(prompts, str | bytes) or any(isinstance(text, str) for text in prompts):
        raise ValueError(
            "prompts must be a list of token lists, got text: deltarule.models.bytes.encode(text) "
            "makes tokens"
        )
    rows = [_as_list(index, prompt) for index, prompt in enumerate(prompts)]
    vocab_size = model.config.vocab_size
    for index, row in enumerate(rows):
        if not row and state is not None:
            raise ValueError(
                f"prompts[{index}] is empty: after a given state each prompt needs at least one "
                "token, since the state does not hold the prediction that follows it"
            )
        if not row and vocab_size != VOCAB_SIZE:
            raise ValueError(
                f"prompts[{index}] is empty: only a model of byte tokens (vocab_size={VOCAB_SIZE}) "
                f"has BEGIN to start from, and this one has vocab_size={vocab_size}"
            )
        _check_range(f"prompts[{index}]", row, vocab_size)
    if state is not None:
        one_for_all = all(len(tensor) == 1 for layer in state for tensor in layer.values())
        check_state(state, 1 if one_for_all else len(rows), model.config.num_layers)
    return [row or [BEGIN] for row in rows]


def _as_list(index: int, prompt: Prompt) -> list[int]:
    if isinstance(prompt, Tensor):
        if prompt.ndim != 1 or prompt.is_floating_point():
            raise ValueError(
                f"prompts[{index}] must be integers [T], got {prompt.dtype} {list(prompt.shape)}"
            )
        prompt = prompt.tolist()
    try:
        return list(map(operator.index, prompt))
    except TypeError:
        raise ValueError(f"prompts[{index}] must be a list of tokens, got {prompt!r:.80}") from None


class Rows:
    """What each row has added, and which rows go on."""

    def __init__(self, count: int, options: Options) -> None:
        self.stops, self.most = options.stop_sequences(), options.max_new_tokens
        self.added: list[list[int]] = [[] for _ in range(count)]
        self.going = list(range(count))

    def take(self, tokens: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, int]]:
        """Give a step's tokens of the rows that go on; those that are done with them leave."""
        going = []
        for row in self.going:
            for token in tokens[row]:
                yield row, self.add(row, token)
                if self.done(row):
                    break
            else:
                going.append(row)
        self.going = going

    def add(self, row: int, token: int) -> int:
        """Add a token to a row; -1 is none."""
        if token < 0:
            raise ValueError(DAMAGED)
        self.added[row].append(token)
        return token

    def done(self, row: int) -> bool:
        added = self.added[row]
        stopped = any(added[-len(sequence) :] == sequence for sequence in self.stops)
        return stopped or len(added) == self.most
