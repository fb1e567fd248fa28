"""What a checkpoint of any family holds: found in a folder, or laid out before it is written."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from deltarule.models import files
from deltarule.models.block import mlp_kinds, mlp_size
from deltarule.models.config import MODEL_TYPE, ModelConfig
from deltarule.models.convert.families import family_of, named
from deltarule.models.convert.names import Piece
from deltarule.nn import RWKV7, Attention, LatentAttention, Mamba1
from deltarule.nn.mixer import Mixer

# What a recurrent layer has become, by the option that says it.
_RECURRENT = (
    "num_v_heads", "head_k_dim", "head_v_dim", "conv_size", "conv_bias", "beta_max", "n_steps",
    "gate_lower_bound", "feature_map", "qk_norm", "output_norm", "normalizer",
)  # fmt: skip
# What attention has become, by the option that says it.
_ATTENTION = {
    "num_attention_heads": "num_heads", "num_kv_heads": "num_kv_heads",
    "attention_head_dim": "head_dim", "attention_qk_norm": "attention_qk_norm",
    "partial_rotary_factor": "partial_rotary_factor", "attention_multiplier": "scale",
}  # fmt: skip
_LATENT = {"num_attention_heads": "num_heads"}
_OTHER = ("low_rank_dims", "attention_gate", "output_gate", "output_norm_eps", "rope_theta")
# Options that are never None, where no layer has taken them.
_UNUSED = {"attention_gate": False, "partial_rotary_factor": 1.0, "rope_theta": 10000.0}
# Makes a model of shapes only.
Build = Callable[[ModelConfig], Any]


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


class Layout(NamedTuple):
    """What a folder holds: its config.json, its tensors, and where they lie if it is there."""

    fields: dict[str, Any]
    pieces: list[Piece]
    places: Mapping[str, files.Place] = MappingProxyType({})


def written(model: Any, family: str | None, build: Build) -> Layout:
    """Lay out what `save` writes, after a check that reading it gives the same model."""
    shapes = shapes_of(model)
    if family in (None, MODEL_TYPE):
        return Layout(model.config.to_fields(), [Piece(name, (name,)) for name in shapes])
    layout = named(family, "family")
    config = resolved(model.config, model.blocks)
    refusal = f"family {family!r} cannot describe this model"
    try:
        fields = layout.fields(config)
        back = layout.config(fields)
    except ValueError as error:
        raise ValueError(f"{refusal}: {error}") from None
    again = resolved(back, build(back).blocks)
    options = [(name, value, getattr(again, name)) for name, value in vars(config).items()]
    if lost := [f"{name} {a!r} would be read as {b!r}" for name, a, b in options if a != b]:
        raise ValueError(f"{refusal}: {', '.join(lost)}")
    pieces = layout.tensors.pieces(config, shapes, lambda name: False)
    check_parts(pieces, shapes)
    return Layout(fields, pieces)


def stored(folder: str | Path, build: Build) -> tuple[Layout, Any]:
    """Find every tensor of a model in a folder; the model has shapes only."""
    fields = files.read_config(folder)
    with files.naming(Path(folder) / files.CONFIG):
        family = family_of(fields)
        config = ModelConfig.from_fields(fields) if family is None else family.config(fields)
    places = files.read_places(folder)
    ignored, derived = (family.ignored, family.derived) if family else ((), ())
    if left := [x for x in places if x.startswith(ignored) or x.endswith(derived)]:
        places = {name: place for name, place in places.items() if name not in left}
        warnings.warn(
            f"{folder}: {len(left)} tensors that are no parameters of a language model are left "
            f"out, such as {left[0]!r}",
            stacklevel=3,
        )
    # A damaged config.json could ask for any number of layers: count before building.
    if config.num_layers > len(places):
        raise files.CheckpointError(
            f"{folder}: {files.CONFIG} asks for num_layers={config.num_layers}, "
            f"but only {len(places)} tensors are stored"
        )
    with files.naming(Path(folder) / files.CONFIG):
        model = build(config)
    shapes = shapes_of(model)
    pieces = [Piece(name, (name,)) for name in shapes]
    if family is not None:
        has = lambda name: files.plain_name(name) in places  # noqa: E731
        pieces = family.tensors.pieces(config, shapes, has)
    check_parts(pieces, shapes)
    expected = {files.plain_name(piece.name): piece.shape(shapes) for piece in pieces}
    files.check_places(folder, str(fields.get("model_type", MODEL_TYPE)), places, expected)
    return Layout(fields, pieces, places), model


def check_parts(pieces: list[Piece], shapes: Mapping[str, tuple[int, ...]]) -> None:
    named = {part for piece in pieces for part in piece.parts}
    if lost := [name for name in shapes if name not in named]:
        raise ValueError(f"the family has no name for the parameter {lost[0]!r}")


def resolved(config: ModelConfig, blocks: nn.ModuleList) -> ModelConfig:
    """Write out what the layers took for the options that are None.

    An option that no layer takes becomes None, and so does one that they have taken differently.
    """
    seen: dict[str, set[Any]] = {name: set() for name in (*_RECURRENT, *_ATTENTION, *_OTHER)}
    for mixer in (module for module in blocks.modules() if isinstance(module, Mixer)):
        if mixer.takes("rope_theta"):
            seen["rope_theta"].add(mixer.rope_theta or config.rope_theta)
        if isinstance(mixer, Attention):
            seen["attention_gate"].add(mixer.g_proj is not None)
            latent = isinstance(mixer, LatentAttention)
            for option, name in (_LATENT if latent else _ATTENTION).items():
                seen[option].add(getattr(mixer, name))
            continue
        seen["output_gate"].add(mixer.g_proj is not None)
        if mixer.takes("norm_eps"):
            seen["output_norm_eps"].add(mixer.norm_eps)
        if isinstance(mixer, Mamba1) and config.mamba_inner_norm is not None:
            seen["output_norm_eps"].add(mixer.inner_norm_eps)
        if isinstance(mixer, RWKV7) and mixer.value_proj is not None:
            seen["low_rank_dims"].add(mixer.low_rank_dims())
        for name in _RECURRENT:
            if mixer.takes(name):
                seen[name].add(getattr(mixer, name))
    taken: dict[str, Any] = {
        name: values.pop() if len(values) == 1 else None for name, values in seen.items()
    }
    taken |= {name: value for name, value in _UNUSED.items() if taken[name] is None}
    taken |= {"mlp_size": mlp_size(config), "mlp_layer_types": mlp_kinds(config)}
    return dataclasses.replace(config, **taken)
