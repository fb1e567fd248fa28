"""One decoding step of a model on buffers of its own, which on a GPU is a CUDA graph.

    prompt                ->  token_1, state_0            where it is short, a graph, too
    token_t, state_{t-1}  ->  token_{t+1}, state_t        no allocation, no wait

The buffers stay where they are, so that a step once captured is replayed for every further token of
every call with as many rows.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from deltarule.models.block import Block
from deltarule.models.prompts import Prompts, overwrite, shapes
from deltarule.models.sampling import Sampling, chosen
from deltarule.nn import ModelState
from deltarule.nn.state import DraftedState, LentState
from deltarule.ops.dispatch import triton_missing
from deltarule.ops.runtime.capture import capturing

if TYPE_CHECKING:
    from deltarule.models.causal_lm import CausalLM

# Caches of attention grow by so many rows, so that lengths that are close share a graph.
ROOM = 256
# Captured steps that a model keeps, the latest; each holds the states of its rows.
KEPT = 4
# Kinds of prompts, the latest, that a kept step begins after.
READ = 8
# Steps before the capture: kernels are compiled and libraries take their memory.
WARM_UP = 2


class Reading(NamedTuple):
    """Buffers for the prompts of a call, and the graph that reads them."""

    prompts: Prompts
    graph: torch.cuda.CUDAGraph | None


class Decoder:
    """Buffers for the rows of one call, as many as `draws`, and the step over them.

    The state has room for the tokens to come, and is the decoder's own from now on.
    """

    def __init__(self, state: ModelState, draws: Tensor, sampling: Sampling, vocab: int) -> None:
        # The state of MLPs alone is empty.
        rows, device = len(draws), draws.device
        self.state, self.sampling = state, sampling
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.draws = torch.zeros(rows, device=device)
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(rows, vocab, dtype=torch.bool, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        # What kernels of the graph count in.
        self.counters: Tensor | None = None
        # By the kind of prompts and the room after them; None: they came, but were not captured.
        self.readings: dict[object, Reading | None] = {}

    @property
    def first(self) -> tuple[Tensor, Tensor]:
        """Of tokens and random numbers the first of each row, [B] each."""
        return self.tokens, self.draws

    def start(self, state: ModelState, tokens: Tensor, seen: Tensor | None = None) -> None:
        """Begin with the state before the tokens [B], and what was seen [B, vocab]: all copied."""
        overwrite(self.state, state)
        self.first[0].copy_(tokens)
        if self.seen is not None and seen is not None:
            self.seen.copy_(seen)

    def begin(self, model: "CausalLM", prompts: Prompts, room: int) -> None:
        logits, state = prompts.read(model)
        picks = chosen(logits, self.first[1], self.sampling, self.seen)
        self.start(lend(model, state, room), picks)

    def read(
        self, model: "CausalLM", prompts: Prompts, room: int, draws: Tensor, seen: Tensor | None
    ) -> None:
        """Begin behind prompts of a kind that is noted: from the third time on by a replay."""
        key = prompts.kind, room
        reading = self.readings.pop(key)
        mine = prompts.clone() if reading is None else reading.prompts
        mine.overwrite(prompts)
        self.first[1].copy_(draws)
        if self.seen is not None and seen is not None:
            self.seen.copy_(seen)
        if reading is not None and reading.graph is not None:
            reading.graph.replay()
        else:
            with as_written(model):
                self.begin(model, mine, room)
        if reading is None:
            try:
                graph = record(model, lambda: self.begin(model, mine, room), self.graph)
            except RuntimeError:
                # Out of memory, or a module waits for the GPU: this kind is read as it is.
                graph = None
            reading = Reading(mine, graph)
        self.readings[key] = reading

    def note(self, prompts: Prompts, room: int) -> None:
        """Prompts were read; they are captured when their kind comes again."""
        if prompts.short:
            self.readings[prompts.kind, room] = None
        for key in list(self.readings)[:-READ]:
            del self.readings[key]

    def advance(self, model: "CausalLM") -> None:
        """Read the tokens, overwrite the state, and put the next tokens in their place."""
        # Where the logits were no numbers the token is -1, and the row goes on from any other.
        read = self.tokens.clamp(min=0).unsqueeze(1)
        x, after = model.hidden(read, self.state)
        if self.seen is not None:
            self.seen.scatter_(1, read, True)
        tokens = chosen(model.logits(x[:, -1]), self.draws, self.sampling, self.seen)
        overwrite(self.state, after)
        self.tokens.copy_(tokens)

    def capture(self, model: "CausalLM") -> None:
        """Record `advance` as a CUDA graph; what the buffers hold is lost."""
        device = self.tokens.device
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side), as_written(model):
            for _ in range(WARM_UP):
                with chain(self):
                    self.advance(model)
        torch.cuda.current_stream(device).wait_stream(side)
        with chain(self) as self.counters:
            self.graph = record(model, lambda: self.advance(model))

    def step(self, model: "CausalLM") -> Tensor:
        """The next tokens [B], in the decoder's buffer; -1 where the logits were no numbers."""
        if self.graph is None:
            with as_written(model):
                self.advance(model)
        else:
            self.graph.replay()
        return self.tokens


class DraftDecoder(Decoder):
    """Buffers for rows of several tokens, all but the first of them guessed, and their step.

    A step draws `picks` [B, 1 + draft], one after each token, of which `accepted` [B] may be taken.
    """

    def __init__(self, state: ModelState, draws: Tensor, sampling: Sampling, draft: int) -> None:
        super().__init__(state, draws, sampling, 0)
        sizes, device = (len(self.tokens), draft + 1), self.tokens.device
        self.tokens = torch.zeros(sizes, dtype=torch.int64, device=device)
        self.picks = torch.zeros_like(self.tokens)
        self.accepted = torch.ones_like(self.tokens[:, 0])
        self.draws = torch.zeros(sizes, device=device)

    @property
    def first(self) -> tuple[Tensor, Tensor]:
        return self.tokens[:, 0], self.draws[:, 0]

    def advance(self, model: "CausalLM") -> None:
        """Read all tokens, draw one after each, and keep the state after those that fit."""
        before = [DraftedState(layer) for layer in self.state]
        x, after = model.hidden(self.tokens, ModelState(before))
        logits = model.logits(x).flatten(0, 1)
        picks = chosen(logits, self.draws.flatten(), self.sampling).view_as(self.tokens)
        fits = picks[:, :-1] == self.tokens[:, 1:]
        last = fits.long().cumprod(1).sum(1)
        self.accepted.copy_(last + 1)
        rows, pairs = torch.arange(len(last), device=last.device), zip(before, after, strict=True)
        overwrite(self.state, ModelState(x.up_to(y, rows, last) for x, y in pairs))
        self.picks.copy_(picks)


def record(
    model: "CausalLM", run: Callable[[], None], beside: torch.cuda.CUDAGraph | None = None
) -> torch.cuda.CUDAGraph | None:
    """The graph of a call, which is not run; its memory is that of a graph that never runs beside.

    All that it calls has been compiled before.
    """
    graph, device = torch.cuda.CUDAGraph(), model.embedding.weight.device
    pool = None if beside is None else beside.pool()
    with (
        torch.cuda.device(device),
        capturing(graph, pool, stream_of_captures(device)),
        as_written(model),
    ):
        run()
    return graph


@functools.cache
def stream_of_captures(device: torch.device) -> torch.cuda.Stream:
    """PyTorch's own is one for all GPUs, on the first that captured; memory is shared on one."""
    return torch.cuda.Stream(device)


def as_written(model: "CausalLM") -> contextlib.AbstractContextManager[object]:
    """Within, compiled blocks run eagerly: tokens, states and prompts would each be compiled."""
    if all(block._compiled_call_impl is None for block in model.blocks):
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def chain(decoder: Decoder) -> contextlib.AbstractContextManager[Tensor | None]:
    """Kernels inside start before the one before them ends, where there are any that can."""
    device = decoder.draws.device
    if triton_missing(device) is not None:
        return contextlib.nullcontext()
    from deltarule.ops.runtime import chained

    return chained.chain(device, [x for layer in decoder.state for x in layer.values()])


def room_for(model: "CausalLM", tokens: int) -> int:
    """Rows that caches of attention need for so many tokens to come; 0 where there is none."""
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    grow = any(block.appended for block in blocks)
    return -(-tokens // ROOM) * ROOM if grow else 0


def lend(model: "CausalLM", state: ModelState, room: int) -> ModelState:
    """The state, of no more use to others, such that so many tokens can overwrite it in place."""
    blocks = zip(model.blocks, state, strict=True)
    return ModelState(
        block.lend(layer, room) for block, layer in blocks if isinstance(block, Block)
    )


# The captured steps of each model, the latest last: what each holds for, and its state's shapes.
Entry = tuple[tuple[object, object], Decoder]
_captured: "WeakKeyDictionary[CausalLM, list[Entry]]" = WeakKeyDictionary()
# Held while one is taken or given back.
_taking = threading.Lock()


def take(kept: list[Entry], fits: Callable[[object, object, Decoder], bool]) -> Entry | None:
    """The first that fits, for the caller alone; None if there is none."""
    with _taking:
        places = (place for place, (key, found) in enumerate(kept) if fits(*key, found))
        place = next(places, None)
        return None if place is None else kept.pop(place)


@contextlib.contextmanager
def captured(
    model: "CausalLM", held: object, prompts: Prompts, draws: Tensor, seen: Tensor | None,
    sampling: Sampling, tokens: int, draft: int = 0,
) -> Iterator[Decoder]:  # fmt: skip
    """A decoder that has begun behind prompts, for this caller alone until it is given back.

    held: Where the parameters are. tokens: How many may follow the prompts.
    """
    kept = _captured.setdefault(model, [])
    # What a graph holds for: where the parameters lie, and how it was computed.
    autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    inference = torch.is_inference_mode_enabled()
    kind = len(draws), draft, held, tuple(sampling), autocast, inference
    room = room_for(model, tokens)
    reading = prompts.kind, room
    found = take(kept, lambda other, _, known: other == kind and reading in known.readings)
    if found is not None:
        key, decoder = found
        decoder.read(model, prompts, room, draws, seen)
    else:
        with as_written(model):
            logits, state = prompts.read(model)
        first, state = chosen(logits, draws, sampling, seen), lend(model, state, room)
        key = kind, shapes(state)
        found = take(kept, lambda *other: other[:2] == key)
        if found is not None:
            decoder = found[1]
        else:
            own = ModelState(LentState(layer.clone()) for layer in state)
            given, size = (own, draws, sampling), model.config.vocab_size
            decoder = DraftDecoder(*given, draft) if draft else Decoder(*given, size)
            decoder.capture(model)
        decoder.start(state, first, seen)
        decoder.note(prompts, room)
    try:
        yield decoder
    finally:
        with _taking:
            kept.append((key, decoder))
            del kept[:-KEPT]


def release_graphs(model: "CausalLM") -> None:
    """Free the captured steps of a model and passes over prompts, and the memory of their states.

    Args:
        model: The model; its next `generate` on a GPU captures anew.

    Examples:
        >>> from deltarule.models import CausalLM, ModelConfig
        >>> model = CausalLM(ModelConfig(vocab_size=257, hidden_size=32, num_layers=1,
        ...                              num_heads=2, layer_types="gated_deltanet"))
        >>> release_graphs(model)
    """
    _captured.pop(model, None)
