"""Models of the same number of parameters: what a mixer leaves over goes into the MLP."""

import dataclasses

from deltarule.models import ModelConfig, count_parameters

# Tensor cores take matrices whose sides are multiples of this.
MULTIPLE = 8


def equal_size(model: ModelConfig, parameters: int) -> ModelConfig:
    """The model with the MLP that brings it nearest to a number of parameters.

    Args:
        model: Everything but its mlp_size, which is replaced.
        parameters: How many to have.

    Raises:
        ValueError: Without any MLP the model has more already.

    Examples:
        >>> model = ModelConfig(vocab_size=257, hidden_size=64, num_layers=2, num_heads=1,
        ...                     layer_types="gated_deltanet")
        >>> count_parameters(equal_size(model, 200_000))
        200004
    """
    smallest = count_parameters(dataclasses.replace(model, mlp_size=MULTIPLE))
    each = count_parameters(dataclasses.replace(model, mlp_size=2 * MULTIPLE)) - smallest
    size = MULTIPLE * (1 + round((parameters - smallest) / each))
    if size < MULTIPLE:
        bare = count_parameters(dataclasses.replace(model, mlp_size=0))
        raise ValueError(
            f"parameters must be at least {smallest:,}, of which {bare:,} are not in the MLP, "
            f"got {parameters:,}"
        )
    return dataclasses.replace(model, mlp_size=size)
