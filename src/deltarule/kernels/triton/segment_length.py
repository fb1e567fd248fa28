"""Whether long sequences are split over the GPU's multiprocessors, and into how long segments."""

from functools import cache

import torch

from deltarule.kernels.inputs import Inputs

# With an erase three passes go over a segment instead of one: fewer segments save no time.
LEAST_SEGMENTS = {"none": 2, "tied": 4, "free": 4}
LEAST_CHUNKS = 4
# Packed sequences that keep every multiprocessor busy for so long need no split.
MOST_WAVES = 4
# Channels of the largest transition matrix that fits beside the state that it acts on.
WIDEST = 128


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; elsewhere 1, so that nothing is split."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def fit_at_once(inputs: Inputs, tile: int) -> bool:
    """Whether there is a multiprocessor for every `tile` rows of the state of every sequence."""
    sequences, heads, value_size, _ = inputs.state_shape
    return sequences * heads * -(-value_size // tile) <= multiprocessors(inputs.q.device)


def chunks_per_segment(inputs: Inputs, erase: str, size: int, tile: int) -> int:
    """Chunks of `size` tokens in a segment, or 0 where sequences stay whole.

    A function of shapes and the GPU alone: as many segments as give every multiprocessor a program,
    where `tile` rows of one head's state make one. Of packed sequences all but one may be short.
    """
    processors = multiprocessors(inputs.q.device)
    too_wide = erase != "none" and inputs.q.shape[3] > WIDEST
    if processors == 1 or inputs.batch_invariant or too_wide:
        return 0
    batch, tokens, heads, value_size = inputs.output_shape
    programs = max(batch * heads * -(-value_size // tile), 1)
    wanted = processors // programs
    if wanted < LEAST_SEGMENTS[erase] or programs * inputs.sequences > MOST_WAVES * processors:
        return 0
    chunks = (tokens + size - 1) // size
    length = max((chunks + wanted - 1) // wanted, LEAST_CHUNKS)
    return length if (chunks + length - 1) // length >= LEAST_SEGMENTS[erase] else 0
