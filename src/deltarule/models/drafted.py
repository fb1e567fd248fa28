"""Generation that guesses: a step reads several tokens, and what does not fit is taken back.

g_1 .. g_n guessed after g_0, t_i drawn after g_i:      t_0 .. t_m are taken, m the first i
                                                        with t_i != g_{i+1}, or n
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from deltarule.models.decoder import DraftDecoder
from deltarule.models.request import Options, Rows
from deltarule.models.sampling import Draws

if TYPE_CHECKING:
    from deltarule.models.causal_lm import CausalLM

# Tokens at the end of a row that are looked up, the most first.
LONGEST = 3


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
        """Return so many tokens, or none where the last one is new."""
        for count in range(min(LONGEST, len(self.tokens)), 0, -1):
            place = self.places.get(tuple(self.tokens[-count:]))
            if place is not None:
                # Past the end, what repeats itself goes on.
                period = len(self.tokens) - place
                return [self.tokens[place + i % period] for i in range(most)]
        return []


class Shares:
    """Each row's random numbers, of which a step may use fewer than it is shown."""

    def __init__(self, draws: Draws, rows: int) -> None:
        self.draws, self.unused = draws, [[0.0] * 0 for _ in range(rows)]

    def first(self, row: int, count: int) -> list[float]:
        """Return the next numbers of a row without using them up."""
        unused = self.unused[row]
        unused += self.draws.ahead(row, count - len(unused))
        return unused[:count]

    def use(self, row: int, count: int) -> None:
        del self.unused[row][:count]


def drafted(
    model: "CausalLM", decoder: DraftDecoder, prompts: list[list[int]], draws: Draws, rows: Rows,
    options: Options,
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """Yield (row, token), of as many tokens a step as were guessed, plus one; or fewer.

    The decoder has begun behind the prompts.
    """
    count, device = options.draft + 1, decoder.tokens.device
    lookups, shares = [Lookup(prompt) for prompt in prompts], Shares(draws, len(prompts))
    taken = [[token] for token in decoder.first[0].tolist()]
    while True:
        for row, token in rows.take(dict(enumerate(taken))):
            lookups[row].add(token)
            yield row, token
        if not rows.going:
            return
        # Rows that are done run along, and nobody looks at them.
        read = [[new[-1], *padded(known, options.draft)] for new, known in zip(
            taken, lookups, strict=True)]  # fmt: skip
        decoder.tokens.copy_(torch.tensor(read, device=device))
        if options.temperature != 0:
            shown = [shares.first(row, count) for row in range(len(prompts))]
            decoder.draws.copy_(torch.tensor(shown, device=device))
        picks, accepted = (x.tolist() for x in decoder.guess(model))
        taken = [new[:fit] for new, fit in zip(picks, accepted, strict=True)]
        for row, fit in enumerate(accepted):
            shares.use(row, fit)


def padded(known: Lookup, most: int) -> list[int]:
    """Guesses, or zeros where there are none: a step reads as many in all rows."""
    return known.guesses(most) or [0] * most
