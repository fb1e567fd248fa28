"""A model compiled: its blocks by `torch.compile`, or its kernels before the first step."""

from collections.abc import Callable
from typing import Any, Literal

import torch

from deltarule.models.block import Block
from deltarule.models.causal_lm import CausalLM
from deltarule.models.config import ModelConfig
from deltarule.models.loss import next_token_loss
from deltarule.ops.warmup import Warmed, require_gpu, warmed

# What one block may need as lengths, gradients and dtypes change: PyTorch's limit for a function.
COMPILATIONS = 8
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
    head stay as they are. Generation runs the blocks as they are written. `torch._dynamo.config`
    then allows 8 compilations more for each block.

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
    # PyTorch counts what it compiles of the blocks of all models together, and refuses the ninth.
    limits = torch._dynamo.config
    limits.recompile_limit += COMPILATIONS * len(model.blocks)
    limits.accumulated_recompile_limit += COMPILATIONS * len(model.blocks)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.compile(fullgraph=True, mode=mode, dynamic=dynamic, backend=backend)


def warmup_model(
    config: ModelConfig, *, batch: int = 1, tokens: int = 2048, backward: bool = True
) -> Warmed:
    """Compile and load what a `CausalLM` of this configuration launches in bfloat16 autocast.

    Args:
        config: Of the model; its blocks of one kind share their kernels.
        batch: Rows of a step.
        tokens: Tokens of a row.
        backward: Whether training follows, or evaluation only.

    Returns:
        The kernels with their seconds, and the seconds in all.

    Raises:
        RuntimeError: There is no CUDA device, or no Triton.

    Examples:
        >>> config = ModelConfig(vocab_size=257, hidden_size=64, num_layers=2, num_heads=2,
        ...                      layer_types="gated_deltanet")
        >>> if torch.cuda.is_available():
        ...     warmup_model(config)
    """
    require_gpu()
    with torch.device("cuda"):
        model = CausalLM(config)
        ids = torch.randint(config.vocab_size, (batch, tokens))

    def run() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16), torch.set_grad_enabled(backward):
            loss = next_token_loss(model(ids)[0], ids)
        if backward:
            loss.backward()

    return warmed(run)
