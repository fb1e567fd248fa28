"""The state of a model as transformers' `generate` holds it, with a way back."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from deltarule.models import CausalLM
from deltarule.nn import ModelState


class Read(NamedTuple):
    """What one call read, and the state before it."""

    model: CausalLM
    tokens: Tensor
    mask: Tensor | None
    state: ModelState | None


class StateCache(Cache):  # type: ignore[misc]
    """A `ModelState` between the calls of `generate`, with beams, copies of rows and rollback.

    A state is never written to, so that the one before a call is there for nothing. To take tokens
    back (assisted generation, prompt lookup), those of the call that stay are read again from it.

    Args:
        state: What an earlier call returned. None: nothing was read.
        seen: Tokens read so far, padding included.

    Attributes:
        state: The state after the last token.
        seen: Tokens read so far.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, state: ModelState | None = None, seen: int = 0) -> None:
        super().__init__(layers=[])
        self.state, self.seen = state, seen
        self._recording = False
        self._reads: list[Read] = []

    def advance(
        self, model: CausalLM, tokens: Tensor, mask: Tensor | None, state: ModelState
    ) -> None:
        """Take the state after these tokens [B, T], of which `mask` marks the real ones."""
        if self._recording:
            self._reads.append(Read(model, tokens, mask, self.state))
        self.state, self.seen = state, self.seen + tokens.shape[1]

    def activate_past_recording(self) -> None:
        """Keep from now on what `crop` needs."""
        self._recording = True

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether `crop` has what it needs."""
        return self._recording

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, given as a number of either sign.

        Raises:
            RuntimeError: So many were not read since the last call but one of this method.
        """
        left = abs(tokens_to_remove)
        while left:
            if not self._reads:
                raise RuntimeError(
                    f"cannot take back {abs(tokens_to_remove)} tokens: activate_past_recording "
                    "must come before the call that reads them"
                )
            model, tokens, mask, state = self._reads.pop()
            kept = max(0, tokens.shape[1] - left)
            left -= tokens.shape[1] - kept
            self.seen -= tokens.shape[1] - kept
            self.state = state
            if kept:
                tokens, mask = tokens[:, :kept], None if mask is None else mask[:, :kept]
                with torch.no_grad():
                    self.state = model.hidden(tokens, state, mask=mask)[1]
                self._reads.append(Read(model, tokens, mask, state))
        # A later crop goes back behind this one by a call at most.
        self._reads = self._reads[-1:]

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.seen, self._reads = None, 0, []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the state of row beam_idx[i] for row i."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take the state of row indices[i] for row i."""
        if self.state is not None:
            self.state = self.state.select(indices)
        self._reads = []

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Copy each row's state `repeats` times, the copies side by side."""
        if self.state is not None:
            rows = torch.arange(self.batch_size).repeat_interleave(repeats)
            self.batch_select_indices(rows)

    @property
    def batch_size(self) -> int:
        """Rows of the state; -1 before the first token."""
        tensors = [] if self.state is None else [x for layer in self.state for x in layer.values()]
        return len(tensors[0]) if tensors else -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read so far."""
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No bound."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Tokens that a mask covers, and where it begins."""
        return self.seen + query_length, 0

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether anything was read."""
        return self.state is not None

    def __len__(self) -> int:
        return 0 if self.state is None else len(self.state)
