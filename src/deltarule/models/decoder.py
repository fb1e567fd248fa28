"""One decoding step of a model on buffers of its own, which on a GPU is a CUDA graph.

    token_t, state_{t-1}  ->  token_{t+1}, state_t        no allocation, no wait

The buffers stay where they are, so that a step once captured is replayed for every further token of
every call with as many rows.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

from deltarule.models.block import Block
from deltarule.models.sampling import chosen
from deltarule.nn import Attention, DeltaMixer, ModelState, SwiGLU
from deltarule.nn.linears import adjoin
from deltarule.nn.state import DraftedState, LentState
from deltarule.ops.dispatch import is_plain_eager, triton_missing

if TYPE_CHECKING:
    from deltarule.models.causal_lm import CausalLM

# Caches of attention grow by so many rows, so that lengths that are close share a graph.
ROOM = 256
# Captured steps that a model keeps, the latest; each holds the states of its rows.
KEPT = 4
# Steps before the capture: kernels are compiled and libraries take their memory.
WARM_UP = 2


class Sampling(NamedTuple):
    """How a token is drawn; see `deltarule.models.generate.generate`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None = None
    repetition_penalty: float = 1.0


class Decoder:
    """Buffers for the rows of one call, and the step over them.

    The state has room for the tokens to come, and is the decoder's own from now on.
    """

    def __init__(self, state: ModelState, sampling: Sampling, vocab_size: int) -> None:
        rows, device = row_count(state), state_device(state)
        self.state, self.sampling = state, sampling
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.draws = torch.zeros(rows, device=device)
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def start(self, state: ModelState, tokens: Tensor, seen: Tensor | None = None) -> None:
        """Begin with the state before the tokens [B], and what was seen [B, vocab]: all copied."""
        overwrite(self.state, state)
        self.tokens.copy_(tokens)
        if self.seen is not None and seen is not None:
            self.seen.copy_(seen)

    def advance(self, model: "CausalLM") -> None:
        """Read the tokens, overwrite the state, and put the next tokens in their place."""
        # Where the logits were no numbers the token is -1, and the row goes on from any other.
        read = self.tokens.clamp(min=0).unsqueeze(1)
        x, after = model.hidden(read, self.state)
        if self.seen is not None:
            self.seen.scatter_(1, read, True)
        tokens = chosen(model.logits(x[:, -1]), self.draws, *self.sampling, self.seen)
        overwrite(self.state, after)
        self.tokens.copy_(tokens)

    def capture(self, model: "CausalLM") -> None:
        """Record `advance` as a CUDA graph; what the buffers hold is lost."""
        device = self.tokens.device
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side), chain(device), as_written(model):
            for _ in range(WARM_UP):
                self.advance(model)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Another thread of the process may use the GPU meanwhile.
        taken = torch.cuda.graph(graph, capture_error_mode="thread_local")
        with taken, chain(device), as_written(model):
            self.advance(model)
        self.graph = graph

    def step(self, model: "CausalLM") -> Tensor:
        """The next tokens [B], in the decoder's buffer; -1 where the logits were no numbers."""
        if self.graph is None:
            with as_written(model):
                self.advance(model)
        else:
            self.graph.replay()
        return self.tokens


class DraftDecoder(Decoder):
    """Buffers for rows of several tokens, all but the first of them guessed, and their step."""

    def __init__(self, state: ModelState, sampling: Sampling, draft: int) -> None:
        super().__init__(state, sampling, 0)
        sizes, device = (len(self.tokens), draft + 1), self.tokens.device
        self.tokens = torch.zeros(sizes, dtype=torch.int64, device=device)
        self.picks = torch.zeros_like(self.tokens)
        self.accepted = torch.ones_like(self.tokens[:, 0])
        self.draws = torch.zeros(sizes, device=device)

    def advance(self, model: "CausalLM") -> None:
        """Read all tokens, draw one after each, and keep the state after those that fit."""
        before = [DraftedState(layer) for layer in self.state]
        x, after = model.hidden(self.tokens, ModelState(before))
        logits = model.logits(x).flatten(0, 1)
        picks = chosen(logits, self.draws.flatten(), *self.sampling).view_as(self.tokens)
        fits = picks[:, :-1] == self.tokens[:, 1:]
        last = fits.long().cumprod(1).sum(1)
        self.accepted.copy_(last + 1)
        rows, pairs = torch.arange(len(last), device=last.device), zip(before, after, strict=True)
        overwrite(self.state, ModelState(x.up_to(y, rows, last) for x, y in pairs))
        self.picks.copy_(picks)

    def guess(self, model: "CausalLM") -> tuple[Tensor, Tensor]:
        """What was drawn after each token [B, 1 + draft], and how many of that to take [B]."""
        self.step(model)
        return self.picks, self.accepted


def as_written(model: "CausalLM") -> contextlib.AbstractContextManager[object]:
    """Within, compiled blocks run eagerly: tokens, states and prompts would each be compiled."""
    if all(block._compiled_call_impl is None for block in model.blocks):
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def chain(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Kernels inside start before the one before them ends, where there are any that can."""
    if triton_missing(device) is not None:
        return contextlib.nullcontext()
    from deltarule.ops.runtime import chained

    return chained.chain(device)


def lend(model: "CausalLM", state: ModelState, tokens: int) -> ModelState:
    """A copy of the state that can be overwritten in place for so many more tokens."""
    room = -(-tokens // ROOM) * ROOM
    blocks = zip(model.blocks, state, strict=True)
    return ModelState(
        block.lend(layer, room) for block, layer in blocks if isinstance(block, Block)
    )


# Where the parameters of each model have been since they were last laid side by side.
_adjoined: "WeakKeyDictionary[CausalLM, object]" = WeakKeyDictionary()


def adjoin_projections(model: "CausalLM", parameters: Sequence[Parameter]) -> None:
    """Lay the weights that read one input side by side in memory; see `deltarule.nn.linears`."""
    if _adjoined.get(model) == places(parameters):
        return
    for module in model.modules():
        if isinstance(module, DeltaMixer | Attention | SwiGLU):
            adjoin(tuple(module.of_input().values()))
    _adjoined[model] = places(parameters)


def places(parameters: Sequence[Parameter]) -> object:
    return tuple((parameter.data_ptr(), parameter.dtype) for parameter in parameters)


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


# The captured steps of each model, the latest last.
_captured: "WeakKeyDictionary[CausalLM, list[tuple[object, Decoder]]]" = WeakKeyDictionary()


@contextlib.contextmanager
def captured(
    model: "CausalLM",
    parameters: Sequence[Parameter],
    state: ModelState,
    sampling: Sampling,
    draft: int = 0,
) -> Iterator[Decoder]:
    """A decoder with its graph, for this caller alone until it is given back."""
    key = draft, kind_of(parameters, state, sampling)
    kept = _captured.setdefault(model, [])
    places = [place for place, (other, _) in enumerate(kept) if other == key]
    if places:
        decoder = kept.pop(places[0])[1]
    else:
        own = ModelState(LentState(layer.clone()) for layer in state)
        if draft:
            decoder = DraftDecoder(own, sampling, draft)
        else:
            decoder = Decoder(own, sampling, model.config.vocab_size)
        decoder.capture(model)
    try:
        yield decoder
    finally:
        kept.append((key, decoder))
        del kept[:-KEPT]


def kind_of(parameters: Sequence[Parameter], state: ModelState, sampling: Sampling) -> object:
    """What a graph holds for: where the parameters lie, the buffers' sizes, how it was computed."""
    shapes = tuple(
        (name, tensor.shape, tensor.dtype) for layer in state for name, tensor in layer.items()
    )
    autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    return shapes, places(parameters), tuple(sampling), autocast, torch.is_inference_mode_enabled()


def captured_parameters(model: "CausalLM") -> tuple[Parameter, ...] | None:
    """What a CUDA graph of a step reads; None where there can be none.

    It takes a GPU, and nothing that watches. The walk through the modules takes as long as the
    host's part of two layers: a call makes it once.
    """
    if model.embedding.weight.device.type != "cuda" or not is_plain_eager():
        return None
    parameters = tuple(model.parameters())
    plain = all(type(parameter) is Parameter for parameter in parameters)
    return parameters if plain else None


def row_count(state: ModelState) -> int:
    return max((len(tensor) for layer in state for tensor in layer.values()), default=0)


def state_device(state: ModelState) -> torch.device:
    return next(tensor.device for layer in state for tensor in layer.values())


def release_graphs(model: "CausalLM") -> None:
    """Free the captured steps of a model, and the memory of their states.

    Args:
        model: The model; its next `generate` on a GPU captures anew.

    Examples:
        >>> from deltarule.models import CausalLM, ModelConfig
        >>> model = CausalLM(ModelConfig(vocab_size=257, hidden_size=32, num_layers=1,
        ...                              num_heads=2, layer_types="gated_deltanet"))
        >>> release_graphs(model)
    """
    _captured.pop(model, None)
