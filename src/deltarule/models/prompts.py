"""The prompts of one call side by side, which the model reads in one pass.

tokens [B, T], padded behind        ->        logits after the last token of each row, state
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from deltarule.nn import ModelState
from deltarule.nn.layout import front_mask
from deltarule.ops.few_tokens import MAX_TOKENS

if TYPE_CHECKING:
    from deltarule.models.causal_lm import CausalLM

# Fewest columns that are added, and parts of a power of two that they fill: close lengths share a
# CUDA graph.
COLUMNS, PARTS = 64, 8
# Products of numbers a layer that a GPU may have done before Python asks for the next layer, and
# tokens, for the memory that a graph keeps.
WORK, TOKENS = 3e11, 2**15


class Prompts(NamedTuple):
    """What is read: each prompt begins in the first column."""

    tokens: Int[Tensor, "B T"]
    # Of each prompt. None: all are as long as there are columns.
    lengths: Int[Tensor, "B"] | None
    # What comes before them, one row a prompt or one for all. None: nothing.
    state: ModelState | None
    # Whether Python may take longer over them than a GPU, and a graph is worth its memory.
    short: bool = False

    @property
    def kind(self) -> object:
        """What a CUDA graph that reads them holds for."""
        state = None if self.state is None else shapes(self.state)
        return self.tokens.shape, self.lengths is None, state

    def read(self, model: "CausalLM") -> tuple[Float[Tensor, "B vocab"], ModelState]:
        """Return the logits after each prompt, and the state."""
        state, (count, columns), lengths = self.state, self.tokens.shape, self.lengths
        if state is not None and any(len(x) < count for layer in state for x in layer.values()):
            state = state.select(self.tokens.new_zeros(count))
        mask = None if lengths is None else front_mask(lengths, columns)
        x, state = model.hidden(self.tokens, state, mask=mask)
        # The head sees the last tokens only: a long prompt never makes [T, vocab] logits.
        if lengths is None:
            return model.logits(x[:, -1]), state
        return model.logits(x[torch.arange(count, device=x.device), lengths - 1]), state

    def clone(self) -> "Prompts":
        lengths, state = self.lengths, self.state
        return Prompts(
            self.tokens.clone(),
            None if lengths is None else lengths.clone(),
            None if state is None else state.clone(),
        )

    def overwrite(self, given: "Prompts") -> None:
        """Take the numbers of others of the same kind."""
        self.tokens.copy_(given.tokens)
        if self.lengths is not None and given.lengths is not None:
            self.lengths.copy_(given.lengths)
        if self.state is not None and given.state is not None:
            overwrite(self.state, given.state)


def side_by_side(
    prompts: Sequence[list[int]], state: ModelState | None, device: torch.device, most: int = 0
) -> Prompts:
    """Pad prompts behind; up to `most` tokens in all are short.

    With graphs and without, so that both give the same bits.
    """
    lengths = [len(prompt) for prompt in prompts]
    longest = columns(max(lengths), len(prompts), most)
    padded = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
    # PyTorch alone takes five times as long over a list of lists.
    tokens = torch.from_numpy(np.array(padded, dtype=np.int64)).to(device)
    # The host knows what is padded: asking a GPU would wait for it.
    ends = torch.tensor(lengths, device=device) if min(lengths) < longest else None
    return Prompts(tokens, ends, state, tokens.numel() <= most)


def columns(longest: int, count: int, most: int) -> int:
    """Columns for so many prompts, the longest of so many tokens, of which `most` are short.

    Examples:
        >>> [columns(longest, 2, 4096) for longest in (1, 2, 17, 65, 1025, 2047, 2049)]
        [1, 16, 64, 128, 1152, 2048, 2049]
    """
    if longest == 1:
        return 1
    # Up to MAX_TOKENS layers read token by token.
    part = max(COLUMNS, 2 ** (longest - 1).bit_length() // (2 * PARTS))
    wide = MAX_TOKENS if longest <= MAX_TOKENS else -(-longest // part) * part
    return wide if wide * count <= most else longest


def most_tokens(parameters: Sequence[Tensor], layers: int) -> int:
    """How many tokens of prompts are short to a model."""
    work = sum(parameter.numel() for parameter in parameters) / layers
    return int(min(WORK / work, TOKENS))


def shapes(state: ModelState) -> object:
    return tuple(
        (name, tensor.shape, tensor.dtype) for layer in state for name, tensor in layer.items()
    )


def overwrite(state: ModelState, other: ModelState) -> None:
    """Give each tensor of the state the other's numbers, unless they are one."""
    pairs = [
        (tensor, given[name])
        for layer, given in zip(state, other, strict=True)
        for name, tensor in layer.items()
        if tensor is not given[name]
    ]
    # One call copies all tensors of a dtype.
    kinds = {(tensor.dtype, given.dtype) for tensor, given in pairs}
    for kind in sorted(kinds, key=str):
        alike = [pair for pair in pairs if (pair[0].dtype, pair[1].dtype) == kind]
        torch._foreach_copy_([pair[0] for pair in alike], [pair[1] for pair in alike])
