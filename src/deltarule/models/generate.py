"""Generation: prompts in, tokens out, one pass over the prompts and one step a token."""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from deltarule.models.arguments import check_state
from deltarule.models.bytes import BEGIN, VOCAB_SIZE
from deltarule.models.decoder import (
    Decoder,
    Sampling,
    adjoin_projections,
    captured,
    captures,
    lend,
    row_count,
)
from deltarule.models.late import Late
from deltarule.models.sampling import DAMAGED, Draws, chosen
from deltarule.nn import ModelState
from deltarule.nn.state import LentState

if TYPE_CHECKING:
    from deltarule.models.causal_lm import CausalLM

Prompt = Sequence[int] | Tensor
Stop = int | Sequence[int]
# Steps whose random numbers are sent to a GPU together.
DRAWN = 64


def generate(
    model: "CausalLM",
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[Stop] = (),
    seed: int | None = None,
    state: ModelState | None = None,
    cuda_graphs: bool = True,
) -> list[list[int]]:
    r"""Continue every prompt, one token at a time.

    .. math::
        \mathrm{token} \sim \mathrm{softmax}(\mathrm{logits} / \mathrm{temperature})
        \quad \text{within the kept set}

    Each prompt draws from its own random numbers, so its result does not depend on its
    neighbours. A prompt that is done costs no more steps, but in a CUDA graph, where it runs along
    until all are done.

    Args:
        model: The model, on any device.
        prompts: Tokens of each prompt, as lists or [T] tensors of any lengths. An empty prompt
            starts from BEGIN, in a model of byte tokens (vocab_size 257).
        max_new_tokens: Most tokens to add to a prompt; 0 adds none.
        temperature: 0 always takes the likeliest token.
        top_k: Keep the k likeliest tokens. None keeps all.
        top_p: Then keep the fewest of the likeliest tokens whose probabilities sum to top_p, in
            (0, 1]. None keeps all.
        stop: Tokens, or sequences of tokens, that end a row once they appear in what it added
            (in the prompt they do not count). They are part of the result.
        seed: Prompt i draws from seed + i. None takes a fresh seed. The global random state is
            neither read nor changed.
        state: What the model returned for earlier tokens, one row a prompt or one row for all: a
            prompt cache. It is not changed. Every prompt then holds at least one token.
        cuda_graphs: On a GPU, decode by replaying a CUDA graph of one step, which the first call
            with as many rows captures and the model keeps (`release_graphs` frees it). False, or a
            CPU, runs the model anew for each token.

    Returns:
        The added tokens of each prompt, without the prompt.

    Raises:
        ValueError: An argument is out of range or does not fit the model; it is named. Or the
            model's logits are not numbers.

    Examples:
        >>> from deltarule.models import CausalLM, ModelConfig
        >>> model = CausalLM(ModelConfig(vocab_size=257, hidden_size=32, num_layers=1,
        ...                              num_heads=2, layer_types="gated_deltanet"))
        >>> rows = model.generate([[1, 2, 3], []], max_new_tokens=5, seed=0)
        >>> [len(row) for row in rows]
        [5, 5]
    """
    options = _Options(max_new_tokens, temperature, top_k, top_p, stop, seed, cuda_graphs)
    options.check(model.config.vocab_size)
    tokens = _check_prompts(model, prompts, state)
    added: list[list[int]] = [[] for _ in tokens]
    for row, token in _sample(model, tokens, options, state):
        added[row].append(token)
    return added


def stream(
    model: "CausalLM",
    prompt: Prompt,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[Stop] = (),
    seed: int | None = None,
    state: ModelState | None = None,
    cuda_graphs: bool = True,
) -> Iterator[int]:
    """Continue one prompt, giving each token as soon as it is drawn.

    The arguments, the errors and the tokens are those of `generate` with this one prompt. Errors
    in the arguments are raised by the call itself, before the first token is asked for.

    Returns:
        An iterator over the added tokens.

    Examples:
        >>> from deltarule.models import CausalLM, ModelConfig
        >>> model = CausalLM(ModelConfig(vocab_size=257, hidden_size=32, num_layers=1,
        ...                              num_heads=2, layer_types="gated_deltanet"))
        >>> len(list(model.stream([1, 2, 3], max_new_tokens=5)))
        5
    """
    options = _Options(max_new_tokens, temperature, top_k, top_p, stop, seed, cuda_graphs)
    options.check(model.config.vocab_size)
    tokens = _check_prompts(model, [prompt], state)
    return (token for _, token in _sample(model, tokens, options, state))


@dataclass(frozen=True)
class _Options:
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    stop: Sequence[Stop]
    seed: int | None
    cuda_graphs: bool

    @property
    def sampling(self) -> Sampling:
        """How a token is drawn."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    def check(self, vocab_size: int) -> None:
        """Refuse what cannot be meant, naming the argument."""
        _check_integer("max_new_tokens", self.max_new_tokens, smallest=0)
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(
                f"temperature must be a finite number of 0 or more, got {self.temperature}"
            )
        if self.top_k is not None:
            _check_integer("top_k", self.top_k, smallest=1)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.seed is not None:
            _check_integer("seed", self.seed, smallest=0)
            if self.seed >= 2**63:
                raise ValueError(f"seed must be below 2**63, got {self.seed}")
        if isinstance(self.stop, int | str | bytes):
            raise ValueError(
                f"stop must be a list of tokens or of token sequences, got {self.stop!r}"
            )
        for sequence in self.stop_sequences():
            if not sequence:
                raise ValueError("stop holds an empty sequence, which would end every row at once")
            _check_range("stop", sequence, vocab_size)

    def stop_sequences(self) -> list[list[int]]:
        """Every stop as a sequence."""
        return [_as_sequence(stop) for stop in self.stop]


def _as_sequence(stop: Stop) -> list[int]:
    try:
        return [stop] if isinstance(stop, int) else [operator.index(token) for token in stop]
    except TypeError:
        raise ValueError(f"stop must hold tokens or sequences of tokens, got {stop!r}") from None


def _check_integer(name: str, value: Any, smallest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ValueError(f"{name} must be an integer of {smallest} or more, got {value!r}")


def _check_range(name: str, tokens: list[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name} must hold tokens in [0, {vocab_size}), got {token}")


def _check_prompts(
    model: "CausalLM", prompts: Sequence[Prompt], state: ModelState | None
) -> list[list[int]]:
    """Return every prompt as a list of at least one token."""
    if isinstance(prompts, str | bytes):
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
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise ValueError(f"prompts[{index}] must hold integer tokens, got {prompt!r:.80}") from None


class _Rows:
    """What each row has added, and which rows go on."""

    def __init__(self, count: int, options: _Options) -> None:
        self.stops, self.left = options.stop_sequences(), options.max_new_tokens
        self.added: list[list[int]] = [[] for _ in range(count)]
        self.going = list(range(count))

    def take(self, tokens: dict[int, int]) -> Iterator[tuple[int, int]]:
        """Give a step's tokens of the rows that go on; those that are done with them leave."""
        self.left -= 1
        going = []
        for row in self.going:
            if (token := tokens[row]) < 0:
                raise ValueError(DAMAGED)
            added = self.added[row]
            added.append(token)
            if not any(added[-len(sequence) :] == sequence for sequence in self.stops):
                going.append(row)
            yield row, token
        self.going = going if self.left else []


@torch.no_grad()
def _sample(
    model: "CausalLM", prompts: list[list[int]], options: _Options, state: ModelState | None
) -> Iterator[tuple[int, int]]:
    """Yield (row, token) in order of time."""
    if not prompts or options.max_new_tokens == 0:
        return
    draws = Draws(options.seed, len(prompts), model.embedding.weight.device)
    if captures(model):
        adjoin_projections(model)
    rows = _Rows(len(prompts), options)
    logits, state = _read_prompts(model, prompts, state)
    tokens = chosen(logits, draws.next(rows.going), *options.sampling)
    if options.cuda_graphs and captures(model):
        lent = lend(model, state, options.max_new_tokens)
        with captured(model, lent, options.sampling) as decoder:
            yield from _replay(model, decoder, lent, tokens, draws, rows)
    else:
        yield from _step(model, state, tokens, draws, rows, options.sampling)


def _step(
    model: "CausalLM",
    state: ModelState,
    tokens: Tensor,
    draws: Draws,
    rows: _Rows,
    sampling: Sampling,
) -> Iterator[tuple[int, int]]:
    """One call of the model a token; rows leave the batch when they are done."""
    while True:
        before = rows.going
        yield from rows.take(dict(zip(before, tokens.tolist(), strict=True)))
        if not rows.going:
            return
        if len(rows.going) < len(before):
            kept = [place for place, row in enumerate(before) if row in set(rows.going)]
            index = torch.tensor(kept, device=tokens.device)
            tokens, state = tokens[index], state.select(index)
        # Every state is the model's own answer, and of no more use after the next.
        lent = ModelState(map(LentState, state))
        x, state = model.hidden(tokens.unsqueeze(1), lent)
        tokens = chosen(model.logits(x[:, -1]), draws.next(rows.going), *sampling)


def _replay(
    model: "CausalLM",
    decoder: Decoder,
    state: ModelState,
    tokens: Tensor,
    draws: Draws,
    rows: _Rows,
) -> Iterator[tuple[int, int]]:
    """One replay a token, read a step late; rows that are done run along and are not looked at."""
    everyone, steps = list(rows.going), rows.left
    decoder.start(state, tokens)
    unread = Late(tokens)
    for step in range(steps):
        read = unread
        if step < steps - 1:
            if step % DRAWN == 0:
                numbers = draws.several(everyone, DRAWN)
            decoder.draws.copy_(numbers[step % DRAWN])
            unread = Late(decoder.step(model))
        yield from rows.take(dict(enumerate(read.tolist())))
        if not rows.going:
            return


def _read_prompts(
    model: "CausalLM", prompts: list[list[int]], state: ModelState | None
) -> tuple[Float[Tensor, "B vocab"], ModelState]:
    """Run all prompts in one pass, padded on the left so that each ends in the last column."""
    device = model.embedding.weight.device
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    mask = torch.arange(longest, device=device) >= longest - lengths[:, None]
    if state is not None and row_count(state) < len(prompts):
        state = state.select(torch.zeros(len(prompts), dtype=torch.int64, device=device))
    x, state = model.hidden(
        torch.tensor(padded, device=device), state, mask=None if bool(mask.all()) else mask
    )
    # The head sees the last position only: a long prompt never makes [T, vocab] logits.
    return model.logits(x[:, -1]), state
