"""What a checkpoint of any family holds: found in a folder, or laid out before it is written."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from deltarule.models import files
from deltarule.models.config import ModelConfig
from deltarule.models.config_names import MODEL_TYPE
from deltarule.models.convert.families import family_of, named, own_pieces
from deltarule.models.convert.piece import Piece
from deltarule.models.convert.resolve import differences, resolved

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
        return Layout(model.config.to_fields(), own_pieces(shapes))
    layout = named(family, "family")
    config = resolved(model.config, model.blocks)
    refusal = f"family {family!r} has no word for this model"
    try:
        fields = layout.fields(config)
        back = layout.config(fields)
    except ValueError as error:
        raise ValueError(f"{refusal}: {error}") from None
    again = resolved(back, build(back).blocks)
    if lost := differences(config, again):
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
    if left := [name for name in places if family and family.leaves_out(name)]:
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
    pieces = own_pieces(shapes)
    if family is not None:
        pieces = family.tensors.pieces(
            config, shapes, lambda name: files.plain_name(name) in places
        )
    check_parts(pieces, shapes)
    expected = {files.plain_name(piece.name): piece.shape(shapes) for piece in pieces}
    files.check_places(folder, str(fields.get("model_type", MODEL_TYPE)), places, expected)
    return Layout(fields, pieces, places), model


def check_parts(pieces: list[Piece], shapes: Mapping[str, tuple[int, ...]]) -> None:
    named = {part for piece in pieces for part in piece.parts}
    if lost := [name for name in shapes if name not in named]:
        raise ValueError(f"the family has no name for the parameter {lost[0]!r}")
