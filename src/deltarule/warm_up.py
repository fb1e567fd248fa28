"""`deltarule warmup`: compile the kernels of a call, or of a model's configuration file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from deltarule.models.config import ModelConfig
from deltarule.models.warmup import warmup_model
from deltarule.ops.warmup import warmup


@dataclass(frozen=True)
class WarmupRun:
    """Compile the GPU kernels of a call, or of a model, ahead of the first step."""

    config: Path | None = None
    """JSON of a ModelConfig (config.json of a checkpoint); None takes the sizes below."""
    erase: Literal["none", "tied", "free"] = "tied"
    """Erase nothing, along the key, or along free vectors."""
    decay: Literal["none", "head", "channel"] = "head"
    """No decay, one for each head, or one for each key channel."""
    n_steps: int = 1
    """Writes for each token."""
    batch: int = 1
    """Batch rows, or packed sequences."""
    tokens: int = 2048
    """Tokens in each row."""
    heads: int = 16
    """Query and key heads."""
    v_heads: int | None = None
    """Value heads; None is as many as heads."""
    head_k_dim: int = 128
    """Channels of a query or key."""
    head_v_dim: int = 128
    """Channels of a value."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of queries, keys and values."""
    normalize_qk: bool = False
    """Whether q and k are divided by their norm in the kernels."""
    packed: bool = False
    """Whether calls come with cu_seqlens."""
    forward_only: bool = False
    """Leave out the kernels of the backward."""


def warm_up(run: WarmupRun) -> None:
    try:
        if run.config is not None:
            config = ModelConfig.from_json(run.config.read_text())
            found = warmup_model(
                config, batch=run.batch, tokens=run.tokens, backward=not run.forward_only
            )
        else:
            found = warmup(
                heads=run.heads, v_heads=run.v_heads, head_k_dim=run.head_k_dim,
                head_v_dim=run.head_v_dim, erase=run.erase, decay=run.decay, n_steps=run.n_steps,
                dtype=getattr(torch, run.dtype), normalize_qk=run.normalize_qk, packed=run.packed,
                backward=not run.forward_only, batch=run.batch, tokens=run.tokens,
            )  # fmt: skip
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    for kernel, seconds, cached in found.compiled:
        print(f"{kernel:<32} {'in the cache' if cached else f'{seconds:.2f} s'}")
    print(f"{len(found.compiled)} kernels ready in {found.seconds:.1f} s")
