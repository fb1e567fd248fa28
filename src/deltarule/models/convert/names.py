"""Tables of names: what a family calls the tensors of a model, and how it holds their rows.

stored = [rows of part 1, rows of part 2, ...] for group 1, the same for group 2, ...

A name may be that of a module: then it stands for the module's weight and its bias. What a model
has no parameter for is passed over, so one table serves models of all options.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from deltarule.models.block import mlp_kinds
from deltarule.models.config import ModelConfig

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
# Whether a folder that is read has a tensor of that name; no when one is written.
Has = Callable[[str], bool]
Form = Callable[[Shape], Shape]


def filters(shape: Shape) -> Shape:
    return shape[0], 1, *shape[1:]


def flat(shape: Shape) -> Shape:
    return (math.prod(shape),)


@dataclass(frozen=True)
class Piece:
    """One stored tensor and the parameters whose rows it holds.

    Args:
        name: Of the stored tensor.
        parts: Names of parameters, in the order of their rows.
        groups: Into how many equal groups the rows of each part are cut; the stored rows are
            group by group.
        form: From the shape that the rows have here to the shape that is stored.
        rows: The first and the last but one of the rows of the one part, its first two axes taken
            as one, that are stored here. None: all.
    """

    name: str
    parts: tuple[str, ...]
    groups: int = 1
    form: Form = lambda shape: shape
    rows: tuple[int, int] | None = None

    def shape(self, shapes: Shapes) -> Shape:
        """Return the shape of the stored tensor, from those of the parameters."""
        if self.rows is not None:
            return self.form((self.rows[1] - self.rows[0], *shapes[self.parts[0]][2:]))
        rows = sum(shapes[part][0] for part in self.parts)
        return self.form((rows, *shapes[self.parts[0]][1:]))

    def read(self, stored: Tensor, shapes: Shapes, found: dict[str, Tensor]) -> None:
        """Put the parameters of the stored tensor among those found, each in its own memory."""
        first = self.parts[0]
        if self.rows is not None:
            whole = found.setdefault(first, stored.new_empty(shapes[first]))
            if whole.dtype != stored.dtype:
                raise ValueError(
                    f"tensor {self.name!r} is {stored.dtype}, but others of {first!r} are "
                    f"{whole.dtype}: give them one dtype"
                )
            own = whole.flatten(0, 1)[slice(*self.rows)]
            own.copy_(stored.reshape(own.shape))
            return
        if len(self.parts) == 1:
            found[first] = stored.reshape(shapes[first])
            return
        rows = [shapes[part][0] // self.groups for part in self.parts]
        grouped = stored.reshape(self.groups, sum(rows), -1).split(rows, dim=1)
        for part, x in zip(self.parts, grouped, strict=True):
            found[part] = x.reshape(shapes[part]).clone()

    def write(self, tensors: Sequence[Tensor]) -> Tensor:
        """Put the parameters, in the order of `parts`, into one tensor."""
        if self.rows is not None:
            own = tensors[0].flatten(0, 1)[slice(*self.rows)]
            return own.reshape(self.form(tuple(own.shape)))
        shapes = {part: tuple(x.shape) for part, x in zip(self.parts, tensors, strict=True)}
        grouped = [x.unflatten(0, (self.groups, len(x) // self.groups)) for x in tensors]
        joined = grouped[0] if len(grouped) == 1 else torch.cat(grouped, dim=1)
        return joined.reshape(self.shape(shapes))


@dataclass(frozen=True)
class Rows:
    """What a stored tensor holds, where another name does not say it all.

    Args:
        parts: Parameters or modules, in the order of their rows, with spaces between them.
        groups: The option of `ModelConfig` that says into how many groups the rows are cut.
        form: From the shape of the rows here to the stored one. None: filters of a convolution as
            they are stored everywhere, and others as they are here.
        share: Which of how many equal shares of a parameter's rows it is. None: all.
        gated: In models with gates of their outputs alone, or in those without. None: in both.
    """

    parts: str
    groups: str | None = None
    form: Form | None = None
    share: tuple[int, int] | None = None
    gated: bool | None = None


@dataclass(frozen=True)
class Experts:
    """Matrices of experts: all of them in one tensor each, if they are stored so, or one by one.

    Args:
        apart: What reads the stream in each expert, and, last, what writes to it.
        together: What reads, and what writes, in all of them.
        ours: How the names of both parameters begin.
    """

    apart: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    together: tuple[str, str] = ("gate_up_proj", "down_proj")
    ours: str = ""

    def names(self, theirs: str, count: int, has: Has) -> "Names":
        into, out = f"{self.ours}up_proj", f"{self.ours}down_proj"
        if has(theirs + self.together[0]):
            return dict(zip((theirs + name for name in self.together), (into, out), strict=True))
        *reading, writing = self.apart
        found = {}
        for parameter, names in ((into, reading), (out, [writing])):
            stored = [f"{theirs}{i}.{name}.weight" for i in range(count) for name in names]
            for place, name in enumerate(stored):
                found[name] = Rows(parameter, share=(place, len(stored)))
        return found


# By what they are called there, with | before a name that is read, too, but not written.
Own = str | Rows | Experts
Names = Mapping[str, Own]


def same(*names: str) -> Names:
    return {name: name for name in names}


def under(theirs: str, names: Names, ours: str = "") -> Names:
    return {theirs + name: placed(own, lambda part: ours + part) for name, own in names.items()}


def placed(own: Own, place: Callable[[str], str]) -> Own:
    if isinstance(own, Experts):
        return replace(own, ours=place(own.ours))
    if isinstance(own, Rows):
        return replace(own, parts=" ".join(map(place, own.parts.split())))
    return " ".join(map(place, own.split()))


ATTENTION = under("self_attn.", same("q_proj", "k_proj", "v_proj", "o_proj"), "mixer.")
MLP = same("gate_proj", "up_proj", "down_proj")
# Norms of a layer before its two halves.
NORMS = {"input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm"}
CONVOLUTIONS = {f"{letter}_conv1d": f"{letter}_conv" for letter in "qkv"}


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """What the tensors of a family are called.

    Args:
        layer: Those of a layer, by their names behind it, and here by their names in the block,
            for each part that brings some: a mixer, or what stands in its place; "dense" or
            "sparse", the second half; "", every layer.
        model: Those of the model beside embedding, last norm and head.
        root: How names of the model begin; "model." is read, too.
        embedding: The embedding.
        norm: The last norm.
        layers: All layers.
        blocks: How many blocks here are one layer there.
    """

    layer: Mapping[str, Names]
    model: Names = field(default_factory=dict)
    root: str = "model."
    embedding: str = "embed_tokens"
    norm: str = "norm"
    layers: str = "layers"
    blocks: int = 1

    def pieces(self, config: ModelConfig, shapes: Shapes, has: Has) -> list[Piece]:
        """Every stored tensor of a model, by the shapes of its parameters.

        `has` says whether a tensor of that name is there, where a family has names to choose from.
        """
        root = "model." if has(f"model.{self.embedding}.weight") else self.root
        outer = {root + self.embedding: "embedding", root + self.norm: "norm", "lm_head": "head"}
        model = Model(config, shapes, has)
        found = [*model.pieces({**outer, **self.model}, "", "")]
        for index, half in enumerate(mlp_kinds(config)):
            layer, block = f"{root}{self.layers}.{index // self.blocks}.", f"blocks.{index}."
            mixers = config.layer_types[index].split("+")
            for part in ("", *mixers, half):
                names = self.layer.get(part, {})
                if len(mixers) > 1 and part in mixers:
                    names = side_by_side(names, part)
                found += model.pieces(names, layer, block)
        return found


def side_by_side(names: Names, part: str) -> Names:
    """Names of a mixer that is one of several in a block."""
    place = lambda own: own.replace("mixer.", f"mixer.{part}.", 1)  # noqa: E731
    return {name: placed(own, place) for name, own in names.items()}


def backbone(parts: Mapping[str, Names]) -> Tensors:
    """One part to a layer, named as Mamba's authors did."""
    layer = {part: under("mixer.", names, "mixer.") for part, names in parts.items()}
    layer[""] = {"norm": "mixer_norm"}
    return Tensors(root="backbone.", embedding="embeddings", norm="norm_f", layer=layer)


class Model(NamedTuple):
    """What there is to name."""

    config: ModelConfig
    shapes: Shapes
    has: Has

    def pieces(self, names: Names, theirs: str, ours: str) -> Iterator[Piece]:
        """The stored tensors of a table, behind the name of a layer there and of a block here."""
        for name, own in names.items():
            if isinstance(own, Experts):
                experts = own.names(theirs + name, self.config.num_experts, self.has)
                yield from self.pieces(experts, "", ours)
                continue
            rows = Rows(own) if isinstance(own, str) else own
            if rows.gated in (None, self.config.output_gate):
                yield from self.tensors([theirs + x for x in name.split("|")], rows, ours)

    def tensors(self, names: list[str], rows: Rows, ours: str) -> Iterator[Piece]:
        """Parameters by these names, and weights and biases of modules by these."""
        for ending in ("", ".weight", ".bias"):
            parts = tuple(f"{ours}{part}{ending}" for part in rows.parts.split())
            if parts[0] not in self.shapes:
                continue
            name, *others = (name + ending for name in names)
            name = next(filter(self.has, others), name)
            groups = 1 if rows.groups is None else getattr(self.config, rows.groups)
            form = rows.form or (filters if parts[0].endswith("_conv.weight") else Piece.form)
            own = None
            if rows.share is not None:
                place, shares = rows.share
                size = math.prod(self.shapes[parts[0]][:2]) // shares
                own = place * size, (place + 1) * size
            yield Piece(name, parts, groups, form, own)
