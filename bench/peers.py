"""transformers' own PyTorch implementations (its fallbacks without a kernel package)."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from deltarule.train.extra import require

MODELS = "transformers.models"


def gated_delta_rule(inputs: Mapping[str, Tensor]) -> Tensor:
    """One decay for each head, as Qwen3-Next calls it."""
    return _call("qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule", inputs)


def kda(inputs: Mapping[str, Tensor]) -> Tensor:
    """One decay for each key channel, as Kimi Linear calls it."""
    return _call("kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention", inputs)


def versions() -> dict[str, str]:
    """The version of transformers, or the error that names the missing extra."""
    return {"transformers": require("transformers", "hf").__version__}


def _call(module: str, name: str, inputs: Mapping[str, Tensor]) -> Tensor:
    found = getattr(require(f"{MODELS}.{module}", "hf"), name)
    # Unwrapped: the decorator would prefer a kernel package, were one installed.
    function: Callable[..., tuple[Tensor, Any]] = inspect.unwrap(found)
    q, k, v, g, beta = (inputs[name] for name in ("q", "k", "v", "log_decay", "beta"))
    return function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
