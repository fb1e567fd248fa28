"""transformers' own PyTorch implementations (its fallbacks without a kernel package)."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from deltarule.train.extra import MissingExtraError

MODELS = "transformers.models"


def gated_delta_rule(inputs: Mapping[str, Tensor]) -> Tensor:
    """One decay for each head, as Qwen3-Next calls it."""
    return _call("qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule", inputs)


def kda(inputs: Mapping[str, Tensor]) -> Tensor:
    """One decay for each key channel, as Kimi Linear calls it."""
    return _call("kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention", inputs)


def versions() -> dict[str, str]:
    """The version of transformers, or the error that names the missing extra."""
    return {"transformers": _import("transformers").__version__}


def _call(module: str, name: str, inputs: Mapping[str, Tensor]) -> Tensor:
    # Unwrapped: the decorator would prefer a kernel package, were one installed.
    function: Callable[..., Any] = inspect.unwrap(getattr(_import(f"{MODELS}.{module}"), name))
    output, _ = function(
        inputs["q"],
        inputs["k"],
        inputs["v"],
        g=inputs["log_decay"],
        beta=inputs["beta"],
        use_qk_l2norm_in_kernel=True,
    )
    tensor: Tensor = output
    return tensor


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        raise MissingExtraError(
            "this benchmark compares with transformers 5.23, which is in the extra 'hf': "
            'pip install "deltarule[hf]" (from a checkout: pip install -e ".[hf]")'
        ) from error
