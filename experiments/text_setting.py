"""The settings that the experiments on text share: sizes, tokens and rates.

Models have the same number of parameters: what a mixer leaves over goes into the MLP.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal

from deltarule.models import ModelConfig, count_parameters
from deltarule.models.bytes import VOCAB_SIZE
from deltarule.train.loop import LoopOptions
from deltarule.train.optimizer import OptimizerOptions
from experiments.experiment import Result
from experiments.text_cell import TextCell
from experiments.words import read_settings

Size = Literal["laptop", "small", "large"]
SIZES = read_settings("text")
# Tensor cores take matrices whose sides are multiples of this.
MULTIPLE = 8


def text_model(layer_types: str, size: Size) -> ModelConfig:
    """A model of one mixer or pattern, with all that is not named here at the mixer's default."""
    return ModelConfig(vocab_size=VOCAB_SIZE, layer_types=layer_types, **SIZES[size]["model"])


def text_cells(
    models: Mapping[str, ModelConfig], size: Size, seeds: Sequence[int]
) -> list[TextCell]:
    """A run of each model and seed, MLPs sized so that all have the same number of parameters."""
    form = SIZES[size]
    return [
        TextCell(
            name=f"{name}-seed{seed}",
            model=equal_size(model, form["parameters"]),
            lengths=(form["cell"]["length"],),
            optimizer=OptimizerOptions(**form["optimizer"]),
            loop=LoopOptions(**form["loop"], seed=seed),
            **form["cell"],
        )
        for seed in seeds
        for name, model in models.items()
    ]


@cache
def equal_size(model: ModelConfig, parameters: int) -> ModelConfig:
    """The model with the MLP that brings it nearest to a number of parameters.

    It is refused if it has more without any MLP.
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


def bits(result: Result) -> float:
    """Bits per byte of held-out text, read in rows as long as those of training."""
    first, *_ = result.figures["evaluations"].values()
    return first["bits_per_byte"]


def text_of(results: list[Result]) -> str:
    """What was read, for a reader.

    Examples:
        >>> data = {"source": "Python 3.12.1 standard library", "bytes": 31_000_000}
        >>> text_of([Result("gla-seed0", {}, {"data": data})])
        'Text: Python 3.12.1 standard library, 31,000,000 bytes, a tenth of them held out.'
    """
    data = [run.figures["data"] for run in results]
    texts = dict.fromkeys((text["source"], text["bytes"]) for text in data)
    told = " and ".join(f"{source}, {count:,} bytes" for source, count in texts)
    return f"Text: {told}, a tenth of them held out."
