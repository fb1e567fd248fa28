"""The one language model: embedding, blocks of mixer and MLP, norm, head."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from deltarule.errors import reason
from deltarule.models import files
from deltarule.models import generate as generation
from deltarule.models.arguments import check_inputs
from deltarule.models.block import Block, norm_of_sum, scaled, stream_norm
from deltarule.models.config import ModelConfig
from deltarule.models.convert.layout import shapes_of, stored, written
from deltarule.models.loss import next_token_loss
from deltarule.nn import DeltaMixer, Experts, ModelState, SquaredReLU, SwiGLU
from deltarule.nn.checks import check_integer
from deltarule.nn.embedding import embedded
from deltarule.nn.linears import linear, multiplied
from deltarule.ops.context import Context
from deltarule.shapes import Hidden, Mask, Offsets

Tokens = Int[Tensor, "B T"]
Logits = Float[Tensor, "B T vocab"]
# Numbers that are drawn in less than a millisecond.
FEW = 2**16
# Functions that make a tensor, and those whose result has the shape of their first argument.
MAKES = ("empty", "randn", "zeros", "ones")
KEEPS_SHAPE = ("normal_", "uniform_", "div_", "mul_", "mul", "__mul__", "rmul", "__rmul__")


class CausalLM(nn.Module):
    r"""A causal language model whose blocks are any mix of recurrent layers and attention.

    .. math::
        x &= \mathrm{embedding}[\mathrm{tokens}] \\
        x &\leftarrow x + \mathrm{mixer}_i(\mathrm{norm}(x)) \\
        x &\leftarrow x + \mathrm{mlp}_i(\mathrm{norm}(x)) \qquad i = 1, \dots, \mathrm{layers} \\
        \mathrm{logits} &= W_\mathrm{head} \, \mathrm{norm}(x)

    Args:
        config: Sizes and layers; see `ModelConfig`.

    Attributes:
        activation_checkpointing: True keeps only each block's input for the backward pass and
            computes the rest again: less memory, the same gradients, about a third more time.
        save_states: False, given to all recurrent layers, computes the states of their chunks
            again in the backward pass: less memory, the same gradients.

    Raises:
        ValueError: A layer cannot be built from the configuration.

    Examples:
        >>> config = ModelConfig(vocab_size=257, hidden_size=32, num_layers=2, num_heads=2,
        ...                      layer_types="gated_deltanet")
        >>> model = CausalLM(config)
        >>> tokens = torch.randint(257, (1, 10))
        >>> logits, state = model(tokens)
        >>> logits.shape
        torch.Size([1, 10, 257])
        >>> more, state = model(tokens[:, :1], state)
    """

    def __init__(self, config: ModelConfig) -> None:
        if not isinstance(config, ModelConfig):
            raise ValueError(f"config must be a ModelConfig, got {type(config).__name__}")
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embedding_norm = stream_norm(config) if config.embedding_norm else None
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.num_layers))
        self.norm = stream_norm(config)
        self.head: nn.Linear | None = None
        if not config.tie_embeddings:
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        initialise(self)

    def forward(
        self,
        tokens: Tokens,
        state: ModelState | None = None,
        *,
        cu_seqlens: Offsets | None = None,
        mask: Mask | None = None,
        context: Context | None = None,
    ) -> tuple[Logits, ModelState]:
        """Predict every next token.

        Args:
            tokens: Integers [B, T] in [0, vocab_size).
            state: What an earlier call returned, to continue its rows. None starts afresh.
            cu_seqlens: Offsets [N + 1] of documents packed into one row (B = 1); nothing passes
                from one document to another. None means that each row is a sequence.
            mask: [B, T] bool, False at padding, which changes no other logit and no state.
                None means no padding.
            context: The processes that hold the other tokens of the rows, of
                `deltarule.make_context`; `cu_seqlens` and `mask` are then None. None means that
                all tokens are here.

        Returns:
            Logits [B, T, vocab_size] in the parameters' dtype, and the state after the last token.

        Raises:
            ValueError: An argument has the wrong shape, dtype, device or range; it is named.
        """
        x, state = self.hidden(tokens, state, cu_seqlens=cu_seqlens, mask=mask, context=context)
        return self.logits(x), state

    if TYPE_CHECKING:
        # PyTorch's own annotation says Any.
        __call__ = forward

    def hidden(
        self,
        tokens: Tokens,
        state: ModelState | None = None,
        *,
        cu_seqlens: Offsets | None = None,
        mask: Mask | None = None,
        context: Context | None = None,
    ) -> tuple[Hidden, ModelState]:
        """Do all of `forward` but the head: the same arguments.

        x [B, T, hidden_size] is returned, and the state after the last token.
        """
        check_inputs(self, tokens, state, cu_seqlens, mask, context)
        # What layers share within one pass, such as the first layer's values in RWKV-7.
        shared: dict[str, Tensor] = {}
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        x, branch = scaled(embedded(self.embedding, tokens), self.config.embedding_multiplier), None
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        states = []
        for index, block in enumerate(self.blocks):
            arguments = (None if state is None else state[index], cu_seqlens, mask, shared, context)
            if recompute:
                # Their sum alone is kept. No layer draws random numbers: there is no random state.
                x = x if branch is None else x + branch
                x, branch, after = checkpoint(
                    block, x, None, *arguments, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x, branch, after = block(x, branch, *arguments)
            states.append(after)
        return norm_of_sum(self.norm, x, branch)[1], ModelState(states)

    def logits(self, x: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        """Apply the head to what `hidden` returned."""
        if self.head is None:
            return self.scaled(multiplied(x, self.embedding.weight))
        return self.scaled(linear(x, self.head))

    def scaled(self, logits: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
        """Multiply and bound what the head put out, where the configuration says so."""
        logits = scaled(logits, self.config.lm_head_multiplier)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def loss(self, x: Hidden, targets: Tokens) -> Float[Tensor, ""]:
        """Return the mean cross entropy of the targets [B, T], from what `hidden` returned.

        Like `deltarule.models.next_token_loss` of the logits, which a model whose vocabulary is
        split over processes never gathers for it.
        """
        return next_token_loss(self.logits(x), targets)

    @property
    def save_states(self) -> bool:
        """Whether all recurrent layers keep their chunks' states for the backward pass."""
        return all(m.save_states for m in self.modules() if isinstance(m, DeltaMixer))

    @save_states.setter
    def save_states(self, save: bool) -> None:
        for module in self.modules():
            if isinstance(module, DeltaMixer):
                module.save_states = save

    def init_state(self, batch_size: int) -> ModelState:
        """Return the state before the first token, for batch_size rows."""
        check_integer("batch_size", batch_size, 0)
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        return ModelState(block.init_state(batch_size) for block in blocks)

    # Continue prompts, and one token by token; the model is their first argument.
    generate, stream = generation.generate, generation.stream

    def save(self, folder: str | Path, family: str | None = None) -> None:
        """Write model.safetensors and config.json, each whole or not at all.

        Args:
            folder: Made if absent.
            family: The layout, by a key of `deltarule.models.FAMILIES`, such as "gated_deltanet"
                for flash-linear-attention. None: this library's own, which transformers opens too.

        Raises:
            ValueError: The family is unknown, or cannot describe an option of this model; nothing
                is written then.

        Examples:
            >>> import tempfile
            >>> config = ModelConfig(vocab_size=9, hidden_size=32, num_layers=2, num_heads=2,
            ...                      layer_types="gated_deltanet", mlp_size=64)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     CausalLM(config).save(folder, family="gated_deltanet")
            ...     sorted(path.name for path in Path(folder).iterdir())
            ['config.json', 'model.safetensors']
        """
        layout, tensors = written(self, family, without_memory), self.state_dict()
        whole = {x.name: x.write([tensors[part] for part in x.parts]) for x in layout.pieces}
        files.write_model(folder, layout.fields, whole)

    @staticmethod
    def load(folder: str | Path, *, device: str | torch.device = "cpu") -> "CausalLM":
        """Read what `save` wrote, or a checkpoint of a known family; nothing is ever unpickled.

        The family is what config.json calls its `model_type`; every stored tensor is taken once.

        Args:
            folder: Holds config.json, and model.safetensors or its shards with their index.
            device: Where the parameters go; they keep the dtypes of the file.

        Returns:
            The model.

        Raises:
            CheckpointError: A file is missing, malformed or does not fit; it is named. It is a
                ValueError, as is what says that the device is not there.
        """
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise ValueError(f"device {device} is not available here: {reason(error)}") from None
        layout, model = stored(folder, without_memory)
        shapes = shapes_of(model)
        tensors: dict[str, Tensor] = {}
        for piece in layout.pieces:
            # A copy: the file may be mapped, and it may change later.
            place = layout.places[files.plain_name(piece.name)]
            whole = place.read().to(device, copy=True)
            with files.naming(place.path):
                piece.read(whole, shapes, tensors)
        model.load_state_dict(tensors, assign=True)
        return model


@torch.no_grad()
def initialise(model: CausalLM) -> None:
    """Draw what only the whole model can scale; each mixer has drawn its own parameters.

    parameter           standard deviation
    embedding, head     hidden_size^-1/2              logits of size 1 from a normalised stream
    into the MLP        hidden_size^-1/2              keeps the size of its input
    out of the MLP      mlp_size^-1/2 / sqrt(2 L)     2 L branches add up to a stream of size 1
    out of the mixer    what it drew / sqrt(2 L)      the same
    norms               ones

    The customary 0.02 for the embedding drowns it in the first branches and learns later.
    """
    config = model.config
    branches = math.sqrt(2 * config.num_layers)
    nn.init.normal_(model.embedding.weight, std=config.hidden_size**-0.5)
    if model.head is not None:
        nn.init.normal_(model.head.weight, std=config.hidden_size**-0.5)
    networks = [m for m in model.blocks.modules() if isinstance(m, SwiGLU | SquaredReLU | Experts)]
    inside = {id(weight) for network in networks for weight in network.parameters()}
    for name, weight in model.blocks.named_parameters():
        if id(weight) in inside:
            out = name.removesuffix(".weight").endswith("down_proj")
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5 / (branches if out else 1))
        elif name.endswith("o_proj.weight"):
            weight.div_(branches)


def count_parameters(config: ModelConfig) -> int:
    """Count the parameters of a `CausalLM`, without allocating them.

    Examples:
        >>> count_parameters(ModelConfig(vocab_size=257, hidden_size=32, num_layers=1,
        ...                              num_heads=2, layer_types="attention", mlp_size=0))
        12384
    """
    return sum(parameter.numel() for parameter in without_memory(config).parameters())


def without_memory(config: ModelConfig) -> CausalLM:
    """Build a model of shapes only; even that would draw from the global random state."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), NothingLarge():
        return CausalLM(config).to("meta")


class NothingLarge(TorchFunctionMode):
    """Gives what has many numbers no memory, and draws none of them.

    What has few is as it would be: without numbers, PyTorch loads its compiler to compute with it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The tensor as it is, or whatever else is asked for."""
        kwargs = kwargs or {}
        if func.__name__ in MAKES:
            x = torch.empty(*args, **kwargs | {"device": "meta"})
        elif func.__name__ in KEEPS_SHAPE:
            x = args[0] if args else kwargs["tensor"]
        else:
            return func(*args, **kwargs)
        large = isinstance(x, Tensor) and x.is_meta and x.numel() > FEW
        return x if large else func(*args, **kwargs)
