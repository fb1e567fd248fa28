"""Generation that guesses: a step reads several tokens, and what does not fit is taken back.

g_1 .. g_n guessed after g_0, t_i drawn after g_i:      t_0 .. t_m are taken, m the first i
                                                        with t_i != g_{i+1}, or n
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from deltarule.models.arguments import Options, Rows
from deltarule.models.decoder import DraftDecoder
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
        """Return so many tokens; zeros where the last one is new, as a step reads so many."""
        for count in range(min(LONGEST, len(self.tokens)), 0, -1):
            place = self.places.get(tuple(self.tokens[-count:]))
            if place is not None:
                # Past the end, what repeats itself goes on.
                period = len(self.tokens) - place
                return [self.tokens[place + i % period] for i in range(most)]
        return [0] * most


def drafted(
    model: "CausalLM", decoder: DraftDecoder, prompts: list[list[int]], draws: Draws, rows: Rows,
    options: Options,
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """Yield (row, token), of as many tokens a step as were guessed, plus one; or fewer.

    The decoder has begun behind the prompts.
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
        picks, accepted = (x.tolist() for x in decoder.guess(model))
        taken = [new[:fit] for new, fit in zip(picks, accepted, strict=True)]
        for row, fit in enumerate(accepted):
            draws.use(row, fit)
