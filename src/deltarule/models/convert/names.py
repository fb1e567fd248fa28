"""Tables of names: what a family calls the tensors of a model, and how it holds their rows.

A name may be that of a module: then it stands for the module's weight and its bias. What a model
has no parameter for is passed over, so one table serves models of all options.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from deltarule.models.block import mlp_kinds
from deltarule.models.config import ModelConfig
from deltarule.models.convert.piece import Form, Has, Piece, Shapes, filters, plain


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
        """The names of the tensors."""
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


def backbone(parts: Mapping[str, Names]) -> Tensors:
    """One part to a layer, named as Mamba's authors did."""
    layer = {part: under("mixer.", names, "mixer.") for part, names in parts.items()}
    layer[""] = {"norm": "mixer_norm"}
    return Tensors(root="backbone.", embedding="embeddings", norm="norm_f", layer=layer)


def side_by_side(names: Names, part: str) -> Names:
    """Names of a mixer that is one of several in a block."""
    place = lambda own: own.replace("mixer.", f"mixer.{part}.", 1)  # noqa: E731
    return {name: placed(own, place) for name, own in names.items()}


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
            form = rows.form or (filters if parts[0].endswith("_conv.weight") else plain)
            yield Piece(name, parts, groups, form, self.share(parts[0], rows.share))

    def share(self, part: str, share: tuple[int, int] | None) -> tuple[int, int] | None:
        if share is None:
            return None
        size = math.prod(self.shapes[part][:2]) // share[1]
        return share[0] * size, (share[0] + 1) * size
