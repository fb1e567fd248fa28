"""What every parameter of a model is for, said by the module that has it.

An optimizer decays matrices and leaves the rest: a gate, a scale or a start that shrinks towards
zero is another model, not a simpler one.
"""

from collections.abc import Iterator
from typing import Literal

from torch import nn

Role = Literal["matrix", "embedding", "gate", "scale", "start", "vector"]


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """Name the role of every parameter of a model.

    A module states the roles of parameters, or of all parameters of a submodule, in a class
    attribute `roles`, which adds to that of its base classes; the float32_parameters of a
    `deltarule.nn.Mixer` are gates. A parameter without a role is a matrix if it has two axes or
    more, and otherwise a vector. A tensor under two names (a tied head) has one role.

    Args:
        model: Any module; roles are those of its own submodules, wrapped ones included.

    Returns:
        By parameter name: "matrix"; "embedding"; "gate", of a decay, a write strength or a share;
        "scale", of a norm or a kernel; "start", a learned first state; "vector".

    Examples:
        >>> parameter_roles(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2)))
        {'0.weight': 'embedding', '1.weight': 'matrix', '1.bias': 'vector'}
    """
    stated: dict[int, Role] = {}
    for module in model.modules():
        for name, role in roles_of(module):
            part = getattr(module, name, None)
            tensors = part.parameters() if isinstance(part, nn.Module) else [part]
            stated |= {id(x): role for x in tensors if x is not None and id(x) not in stated}
    return {
        name: stated.get(id(x), "matrix" if x.ndim >= 2 else "vector")
        for name, x in model.named_parameters()
    }


def roles_of(module: nn.Module) -> Iterator[tuple[str, Role]]:
    if isinstance(module, nn.Embedding):
        yield "weight", "embedding"
    for cls in type(module).__mro__:
        yield from vars(cls).get("roles", {}).items()
    yield from ((name, "gate") for name in getattr(module, "float32_parameters", ()))
