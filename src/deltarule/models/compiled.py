"""`torch.compile` of a model block by block, which takes as long as one block does."""

from collections.abc import Callable
from typing import Any, Literal

from deltarule.models.block import Block
from deltarule.models.causal_lm import CausalLM

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


def compile_blocks(
    model: CausalLM,
    *,
    mode: Mode | None = None,
    dynamic: bool | None = None,
    backend: str | Callable[..., Any] = "inductor",
) -> None:
    """Compile a model in place, block by block and without graph breaks.

    Equal blocks share one compilation; the first, which has no branch to add, has its own, and so
    has each Lightning layer, whose decays are of its depth. The embedding, the last norm and the
    head stay as they are. Generation runs the blocks as they are written.

    Args:
        model: The model; nothing is compiled before it is called.
        mode: As in `torch.compile`. None means its default.
        dynamic: Whether lengths may change without compiling anew. None: after the first change.
        backend: What compiles, as in `torch.compile`.

    Examples:
        >>> import torch
        >>> from deltarule.models import ModelConfig
        >>> model = CausalLM(ModelConfig(vocab_size=257, hidden_size=32, num_layers=2,
        ...                              num_heads=2, layer_types="gated_deltanet"))
        >>> compile_blocks(model, backend="eager")
        >>> model(torch.ones(1, 5, dtype=torch.int64))[0].shape
        torch.Size([1, 5, 257])
    """
    for block in model.blocks:
        assert isinstance(block, Block)
        block.compile(fullgraph=True, mode=mode, dynamic=dynamic, backend=backend)
