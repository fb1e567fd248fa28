"""The settings that the experiments on text share: sizes, tokens and rates.

Models have the same number of parameters: what a mixer leaves over goes into the MLP.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from deltarule.models import ModelConfig, count_parameters
from deltarule.models.bytes import VOCAB_SIZE
from deltarule.train.loop import LoopOptions
from deltarule.train.optimizer import OptimizerOptions
from experiments.experiment import Result
from experiments.text_cell import TextCell


class Setting(NamedTuple):
    """What the size decides."""

    hidden_size: int
    num_layers: int
    parameters: int
    length: int
    rows: int
    steps: int
    lr: float
    evaluate_every: int
    dtype: Literal["float32", "bfloat16"]
    held_out_bytes: int


# The gpu form of an experiment with many models has small ones, that of another large ones.
Size = Literal["laptop", "small", "large"]
SETTINGS: dict[Size, Setting] = {
    "laptop": Setting(128, 2, 450_000, 128, 8, 1500, 3e-3, 250, "float32", 200_000),
    "small": Setting(256, 4, 3_300_000, 512, 16, 1000, 3e-3, 100, "bfloat16", 1_000_000),
    "large": Setting(512, 8, 30_000_000, 512, 32, 600, 1.5e-3, 50, "bfloat16", 1_000_000),
}
# Tensor cores take matrices whose sides are multiples of this.
MULTIPLE = 8
# Channels of a head, of keys and of values: the same state for every recurrent layer.
HEAD = 64


def text_model(layer_types: str, size: Size) -> ModelConfig:
    """A model of one mixer or pattern, with all that is not named here at the mixer's default.

    Examples:
        >>> text_model("gated_deltanet_h1", "laptop").layer_types
        ('gated_deltanet', 'sliding_window')
    """
    setting = SETTINGS[size]
    return ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=setting.hidden_size,
        num_layers=setting.num_layers,
        layer_types=layer_types,
        num_heads=setting.hidden_size // HEAD,
        head_k_dim=HEAD,
        head_v_dim=HEAD,
        window=setting.length // 2,
    )


def text_cells(
    models: Mapping[str, ModelConfig], size: Size, seeds: Sequence[int]
) -> list[TextCell]:
    """A run of each model and seed, MLPs sized so that all have the same number of parameters."""
    setting = SETTINGS[size]
    return [
        TextCell(
            name=f"{name}-seed{seed}",
            model=equal_size(model, setting.parameters),
            length=setting.length,
            rows=setting.rows,
            lengths=(setting.length,),
            optimizer=OptimizerOptions(lr=setting.lr),
            loop=LoopOptions(
                steps=setting.steps,
                seed=seed,
                dtype=setting.dtype,
                evaluate_every=setting.evaluate_every,
            ),
            held_out_bytes=setting.held_out_bytes,
        )
        for seed in seeds
        for name, model in models.items()
    ]


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


def bits(result: Result) -> float:
    """Bits per byte of held-out text, read in rows as long as those of training."""
    first, *_ = result.figures["evaluations"].values()
    value: float = first["bits_per_byte"]
    return value


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
