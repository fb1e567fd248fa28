"""What a language model and its generation refuse, whatever its layers, and what rows come to."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deltarule.models.bytes import BEGIN, VOCAB_SIZE
from deltarule.models.sampling import DAMAGED, Sampling
from deltarule.nn import ModelState
from deltarule.nn.checks import check_flags, check_integer, check_that, is_number, of_python
from deltarule.nn.layout import check_mask
from deltarule.ops.checks import check_axes, readable
from deltarule.ops.context import Context, check_context
from deltarule.ops.few_tokens import MAX_TOKENS
from deltarule.ops.pack import check_cu_seqlens

if TYPE_CHECKING:
    from deltarule.models.causal_lm import CausalLM

Prompt = Sequence[int] | Tensor
Stop = int | Sequence[int]
STOPS = "a list of tokens or of token sequences"


def check_inputs(
    model: "CausalLM",
    tokens: Tensor,
    state: ModelState | None,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    context: Context | None,
) -> None:
    vocab_size, device = model.config.vocab_size, model.embedding.weight.device
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
    if context is not None:
        check_context(context, tokens.shape[1], "tokens", cu_seqlens)
        cu_seqlens = context.cu_seqlens(tokens.device)
    if mask is not None:
        check_mask(mask, tokens, "tokens")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, tokens)
    if state is not None:
        sequences = len(tokens) if cu_seqlens is None else len(cu_seqlens) - 1
        check_state(state, sequences, model.config.num_layers)


def check_state(state: ModelState, sequences: int, num_layers: int) -> None:
    """A state of this many layers and sequences; each layer checks the rest of the shape."""
    if not isinstance(state, ModelState) or len(state) != num_layers:
        given = len(state) if isinstance(state, ModelState) else type(state).__name__
        raise ValueError(
            f"state must hold the states of {num_layers} layers, got {given}: "
            "give what this model returned beside the logits"
        )
    rows = {len(tensor) for layer in state for tensor in layer.values()}
    if rows - {sequences}:
        raise ValueError(
            f"state must hold {sequences} rows, one a sequence, got {sorted(rows)}: "
            "state.select(rows) picks or repeats rows"
        )


@dataclass(frozen=True)
class Options:
    """The arguments of `generate` beside its prompts and their state."""

    max_new_tokens: int
    sampling: Sampling
    stops: list[list[int]]
    seed: int | None
    cuda_graphs: bool
    draft: int

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, naming the argument."""
        check_integer("max_new_tokens", self.max_new_tokens, smallest=0)
        temperature, top_k, *shares, penalty = self.sampling
        holds = is_number(temperature) and temperature >= 0
        check_that(holds, "temperature must be a finite number of 0 or more", temperature)
        if top_k is not None:
            check_integer("top_k", top_k, smallest=1)
        for name, share in zip(("top_p", "min_p"), shares, strict=True):
            holds = share is None or (is_number(share) and 0 < share <= 1)
            check_that(holds, f"{name} must be a number in (0, 1]", share)
        holds = is_number(penalty) and 1e-30 <= penalty <= 1e30
        check_that(holds, "repetition_penalty must be a number above 0", penalty)
        said, why = "draft must be 0 with a repetition_penalty", "leave one of them out"
        check_that(penalty == 1 or not self.draft, said, self.draft, why)
        if self.seed is not None:
            check_integer("seed", self.seed, smallest=0)
            check_that(self.seed < 2**63, "seed must be below 2**63", self.seed)
        check_integer("draft", self.draft, smallest=0)
        check_that(self.draft < MAX_TOKENS, f"draft must be at most {MAX_TOKENS - 1}", self.draft)
        check_flags({"cuda_graphs": self.cuda_graphs})


def read_options(
    model: "CausalLM", stop: Sequence[Stop], sampling: Sequence[Any], most: int, *others: Any
) -> Options:
    """The options, checked, each in the order of its fields; NumPy's numbers become Python's."""
    stops = read_stops(stop, model.config.vocab_size)
    drawn = Sampling(*map(of_python, sampling))
    return Options(of_python(most), drawn, stops, *map(of_python, others))


def read_stops(stop: Sequence[Stop], vocab_size: int) -> list[list[int]]:
    """Return what ends a row as sequences of tokens, a token alone as one of its own."""
    try:
        stops = [as_tokens(x) for x in without_text("stop", STOPS, stop)]
    except TypeError:
        raise ValueError(f"stop must be {STOPS}, got {stop!r:.80}") from None
    for sequence in stops:
        if not sequence:
            raise ValueError("stop holds an empty sequence, which would end every row at once")
        check_range("stop", sequence, vocab_size)
    return stops


def without_text(name: str, expected: str, given: Iterable[Any]) -> list[Any]:
    """What is given, which may be made as it is read, as a list; text is no tokens."""
    items = [given] if isinstance(given, str | bytes) else [*given]
    if any(isinstance(item, str | bytes) for item in items):
        said = "got text: deltarule.models.bytes.encode(text) makes tokens"
        raise ValueError(f"{name} must be {expected}, {said}")
    return items


def as_tokens(given: Any) -> list[int]:
    """Integers of any library; one alone is a sequence of one."""
    try:
        return [operator.index(given)]
    except TypeError:
        return list(map(operator.index, given))


def check_range(name: str, tokens: list[int], vocab_size: int) -> None:
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        raise ValueError(f"{name} must hold tokens in [0, {vocab_size}), got {wrong[0]}")


def check_prompts(
    model: "CausalLM", prompts: Sequence[Prompt], state: ModelState | None
) -> list[list[int]]:
    """Return every prompt as a list of at least one token."""
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a list of token lists, got {type(prompts).__name__}")
    prompts = without_text("prompts", "a list of token lists", prompts)
    rows, vocab_size = [], model.config.vocab_size
    for index, prompt in enumerate(prompts):
        name = f"prompts[{index}]"
        if isinstance(prompt, Tensor):
            if prompt.ndim != 1 or prompt.is_floating_point():
                kind = f"{prompt.dtype} {list(prompt.shape)}"
                raise ValueError(f"{name} must be integers [T], got {kind}")
            prompt = prompt.tolist()
        try:
            row = list(map(operator.index, prompt))
        except TypeError:
            raise ValueError(f"{name} must be a list of tokens, got {prompt!r:.80}") from None
        if not row and state is not None:
            raise ValueError(
                f"{name} is empty: after a given state each prompt needs at least one token, since "
                "the state does not hold the prediction that follows it"
            )
        if not row and vocab_size != VOCAB_SIZE:
            raise ValueError(
                f"{name} is empty: only a model of byte tokens (vocab_size={VOCAB_SIZE}) has BEGIN "
                f"to start from, and this one has vocab_size={vocab_size}"
            )
        check_range(name, row, vocab_size)
        rows.append(row or [BEGIN])
    if state is not None:
        known = state if isinstance(state, ModelState) else ()
        one_for_all = all(len(x) == 1 for layer in known for x in layer.values())
        check_state(state, 1 if one_for_all else len(rows), model.config.num_layers)
    return rows


class Rows:
    """What each row has added, and which rows go on."""

    def __init__(self, count: int, options: Options) -> None:
        self.stops, self.most = options.stops, options.max_new_tokens
        self.added: list[list[int]] = [[] for _ in range(count)]
        self.going = list(range(count))

    def take(self, tokens: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, int]]:
        """Give a step's tokens of the rows that go on; those that are done with them leave."""
        going = []
        for row in self.going:
            for token in tokens[row]:
                if token < 0:
                    raise ValueError(DAMAGED)
                (added := self.added[row]).append(token)
                yield row, token
                stopped = any(added[-len(sequence) :] == sequence for sequence in self.stops)
                if stopped or len(added) == self.most:
                    break
            else:
                going.append(row)
        self.going = going
