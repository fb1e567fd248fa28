"""Where the parameters of a model lie, which its CUDA graphs read."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn import Parameter

from deltarule.nn import Attention, DeltaMixer, Experts, SwiGLU
from deltarule.nn.linears import adjoin, is_hooked
from deltarule.ops.dispatch import is_plain_eager

if TYPE_CHECKING:
    from deltarule.models.causal_lm import CausalLM

# Where the parameters of each model have been since they were last laid side by side.
_adjoined: "WeakKeyDictionary[CausalLM, object]" = WeakKeyDictionary()


def adjoin_projections(model: "CausalLM", parameters: Sequence[Tensor]) -> object:
    """Lay the weights that read one input side by side in memory; see `deltarule.nn.linears`.

    Return where the parameters are then.
    """
    found = places(parameters)
    if _adjoined.get(model) == found:
        return found
    for module in model.modules():
        if isinstance(module, DeltaMixer | Attention | SwiGLU):
            adjoin(tuple(module.of_input().values()))
    _adjoined[model] = found = places(parameters)
    return found


def places(parameters: Sequence[Tensor]) -> object:
    return tuple((parameter.data_ptr(), parameter.dtype) for parameter in parameters)


def captured_parameters(model: "CausalLM") -> tuple[Tensor, ...] | None:
    """What a CUDA graph of a step reads; None where there can be none.

    It takes a GPU, nothing that watches, no hook and no layer that waits for it. PyTorch's own walk
    through the modules takes as long as the host's part of a layer.
    """
    if model.embedding.weight.device.type != "cuda" or not is_plain_eager():
        return None
    modules: list[Any] = [model]
    found: list[Any] = []
    for module in modules:
        found += [x for x in module._parameters.values() if x is not None]
        modules += [x for x in module._modules.values() if x is not None]
    parts = [tensors_of(parameter) for parameter in found]
    waits = any(isinstance(module, Experts) and module.waits for module in modules)
    able = all(parts) and not waits and not any(map(is_hooked, modules))
    return tuple(x for own in parts for x in own) if able else None


def tensors_of(parameter: Any) -> list[Tensor]:
    """The plain tensors that a parameter, or one that torchao quantised, is made of; else none."""
    if type(parameter) in (Tensor, Parameter):
        return [parameter]
    if not type(parameter).__module__.startswith("torchao."):
        return []
    names = parameter.__tensor_flatten__()[0]
    return [x for name in names for x in tensors_of(getattr(parameter, name))]
