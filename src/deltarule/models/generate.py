"""Generation: prompts in, tokens out, one pass over the prompts and one step a token."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deltarule.models.adjoined import adjoin_projections, captured_parameters
from deltarule.models.arguments import (
    Options,
    Prompt,
    Rows,
    Stop,
    check_prompts,
    read_options,
)
from deltarule.models.decoder import Decoder, DraftDecoder, as_written, captured, lend, room_for
from deltarule.models.late import Late
from deltarule.models.prompts import most_tokens, side_by_side
from deltarule.models.sampling import Draws, Sampling, chosen
from deltarule.nn import ModelState
from deltarule.nn.state import LentState

if TYPE_CHECKING:
    from deltarule.models.causal_lm import CausalLM

# Steps whose random numbers are sent to a GPU together.
DRAWN = 64
# Tokens at the end of a row that are looked up for a guess, the most first.
LONGEST = 3


def generate(
    model: "CausalLM",
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Sequence[Stop] = (),
    seed: int | None = None,
    state: ModelState | None = None,
    cuda_graphs: bool = True,
    draft: int = 0,
) -> list[list[int]]:
    r"""Continue every prompt, one token at a time.

    .. math::
        \mathrm{token} \sim \mathrm{softmax}(\mathrm{logits} / \mathrm{temperature})
        \quad \text{within the kept set}

    Each prompt draws from its own random numbers, so its result does not depend on its
    neighbours. A finished prompt costs no more steps, except in a CUDA graph, where it stays in the
    batch until all are finished.

    Args:
        model: The model, on any device.
        prompts: Tokens of each prompt, as lists or [T] tensors of any lengths. An empty prompt
            starts from BEGIN, in a model of byte tokens (vocab_size 257).
        max_new_tokens: The most tokens to add to a prompt; 0 adds none.
        temperature: 0 always takes the most likely token.
        top_k: Keep only the k most likely tokens. None keeps all.
        top_p: Of those, keep only the most likely tokens whose probabilities together first reach
            top_p, in (0, 1]. None keeps all.
        min_p: Of those, keep only tokens at least min_p times as likely as the most likely one, in
            (0, 1]. None keeps all.
        repetition_penalty: Before all that, the logits of tokens that the row already holds, its
            prompt included, are divided by this number if above 0 and multiplied by it if below.
        stop: Tokens, or sequences of tokens, that end a row once they appear in what it added
            (in the prompt they do not count). They are part of the result.
        seed: Prompt i draws from seed + i. None takes a fresh seed. The global random state is
            neither read nor changed.
        state: What the model returned for earlier tokens, one row a prompt or one row for all: a
            prompt cache. It is not changed. Every prompt then holds at least one token.
        cuda_graphs: On a GPU, decode by replaying a CUDA graph of one step, which the first call
            with as many rows captures and the model keeps (`release_graphs` frees it), and read
            short prompts by one that the second call with prompts like them captures. False, or a
            CPU, runs the model anew for each token.
        draft: Tokens, up to 15, that are guessed for each row: those that followed where its last
            tokens stood before. The model reads them in one step with the token that they follow,
            and those that it would not have drawn are taken back: text that repeats itself, or its
            prompt, comes in fewer steps. 0 guesses none, and a repetition_penalty asks for 0.

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
    drawn = temperature, top_k, top_p, min_p, repetition_penalty
    options = read_options(model, stop, drawn, max_new_tokens, seed, cuda_graphs, draft)
    tokens = check_prompts(model, prompts, state)
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
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Sequence[Stop] = (),
    seed: int | None = None,
    state: ModelState | None = None,
    cuda_graphs: bool = True,
    draft: int = 0,
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
    drawn = temperature, top_k, top_p, min_p, repetition_penalty
    options = read_options(model, stop, drawn, max_new_tokens, seed, cuda_graphs, draft)
    tokens = check_prompts(model, [prompt], state)
    return (token for _, token in _sample(model, tokens, options, state))


@torch.no_grad()
def _sample(
    model: "CausalLM", prompts: list[list[int]], options: Options, state: ModelState | None
) -> Iterator[tuple[int, int]]:
    """Yield (row, token) in order of time."""
    if not prompts or options.max_new_tokens == 0:
        return
    device = model.embedding.weight.device
    draws = Draws(options.seed, len(prompts), device)
    parameters = captured_parameters(model)
    held, most = None, 0
    if parameters is not None:
        held = adjoin_projections(model, parameters)
        most = most_tokens(parameters, len(model.blocks))
    rows, sampling = Rows(len(prompts), options), options.sampling
    seen = None
    if sampling.repetition_penalty != 1:
        # Which tokens each row holds, bool [B, vocab].
        sizes = len(prompts), model.config.vocab_size
        seen = torch.zeros(sizes, dtype=torch.bool, device="cpu")
        for row, prompt in zip(seen, prompts, strict=True):
            row[prompt] = True
        seen = seen.to(device)
    given, first = side_by_side(prompts, state, device, most), draws.next(rows.going)
    after = options.max_new_tokens + (options.draft + 1 if options.draft else 0)
    if held is not None and options.cuda_graphs:
        call = captured(model, held, given, first, seen, sampling, after, options.draft)
        with call as decoder:
            if isinstance(decoder, DraftDecoder):
                yield from _guess(model, decoder, prompts, draws, rows, options)
            else:
                yield from _replay(model, decoder, draws, rows)
        return
    with as_written(model):
        logits, state = given.read(model)
    tokens = chosen(logits, first, sampling, seen)
    if options.draft:
        state = lend(model, state, room_for(model, after))
        decoder = DraftDecoder(state, first, sampling, options.draft)
        decoder.start(decoder.state, tokens)
        yield from _guess(model, decoder, prompts, draws, rows, options)
    else:
        yield from _step(model, state, tokens, seen, draws, rows, sampling)


def _step(
    model: "CausalLM",
    state: ModelState,
    tokens: Tensor,
    seen: Tensor | None,
    draws: Draws,
    rows: Rows,
    sampling: Sampling,
) -> Iterator[tuple[int, int]]:
    """One call of the model a token; rows leave the batch when they are done."""
    while True:
        before = rows.going
        yield from rows.take(
            {row: [token] for row, token in zip(before, tokens.tolist(), strict=True)}
        )
        if not rows.going:
            return
        if len(rows.going) < len(before):
            kept = [place for place, row in enumerate(before) if row in set(rows.going)]
            index = torch.tensor(kept, device=tokens.device)
            tokens, state = tokens[index], state.select(index)
            seen = None if seen is None else seen[index]
        # Every state is the model's own answer, and of no more use after the next.
        lent = ModelState(map(LentState, state))
        with as_written(model):
            x, state = model.hidden(tokens.unsqueeze(1), lent)
        if seen is not None:
            seen.scatter_(1, tokens.unsqueeze(1), True)
        tokens = chosen(model.logits(x[:, -1]), draws.next(rows.going), sampling, seen)


def _replay(
    model: "CausalLM", decoder: Decoder, draws: Draws, rows: Rows
) -> Iterator[tuple[int, int]]:
    """One replay a token, read a step late; rows that are done run along and are not looked at."""
    everyone, steps = list(rows.going), rows.most
    unread = Late(decoder.tokens)
    for step in range(steps):
        read = unread
        if step < steps - 1:
            if step % DRAWN == 0:
                numbers = draws.several(everyone, DRAWN)
            decoder.draws.copy_(numbers[step % DRAWN])
            unread = Late(decoder.step(model))
        yield from rows.take({row: [token] for row, token in enumerate(read.tolist())})
        if not rows.going:
            return


class Lookup:
    """The tokens of a row, and what followed where its last ones stood before."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        # By a few tokens: the latest place that came after them.
        self.places: dict[tuple[int, ...], int] = {}
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        place = len(self.tokens)
        for count in range(1, min(LONGEST, place) + 1):
            self.places[tuple(self.tokens[place - count :])] = place
        self.tokens.append(token)

    def guesses(self, most: int) -> list[int]:
        """Return so many tokens; zeros where the last one is new, as a step reads so many."""
        for count in range(min(LONGEST, len(self.tokens)), 0, -1):
            place = self.places.get(tuple(self.tokens[-count:]))
            if place is not None:
                # Past the end, what repeats itself goes on.
                period = len(self.tokens) - place
                return [self.tokens[place + i % period] for i in range(most)]
        return [0] * most


def _guess(
    model: "CausalLM", decoder: DraftDecoder, prompts: list[list[int]], draws: Draws, rows: Rows,
    options: Options,
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """As many tokens a step as are guessed, plus one, or fewer: what does not fit is taken back.

    g_1 .. g_n guessed after g_0, t_i drawn after g_i:      t_0 .. t_m are taken, m the first i
                                                            with t_i != g_{i+1}, or n
    """
    device, lookups = decoder.tokens.device, [Lookup(prompt) for prompt in prompts]
    taken = [[token] for token in decoder.first[0].tolist()]
    while True:
        for row, token in rows.take(dict(enumerate(taken))):
            lookups[row].add(token)
            yield row, token
        if not rows.going:
            return
        # Rows that are done run along, and nobody looks at them.
        pairs = zip(taken, lookups, strict=True)
        read = [[new[-1], *known.guesses(options.draft)] for new, known in pairs]
        decoder.tokens.copy_(torch.tensor(read, device=device))
        if options.sampling.temperature != 0:
            shown = [draws.show(row, options.draft + 1) for row in range(len(prompts))]
            decoder.draws.copy_(torch.tensor(shown, device=device))
        decoder.step(model)
        picks, accepted = decoder.picks.tolist(), decoder.accepted.tolist()
        taken = [new[:fit] for new, fit in zip(picks, accepted, strict=True)]
        for row, fit in enumerate(accepted):
            draws.use(row, fit)
