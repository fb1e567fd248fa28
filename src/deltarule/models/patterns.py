"""Named mixtures of layers, as the papers stack them: what `layer_types` may be beside names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from deltarule.models.config_checks import MLP_PARTS
from deltarule.nearest import Named, nearest
from deltarule.nn import MIXERS
from deltarule.nn.checks import check_that


@dataclass(frozen=True)
class Pattern:
    """One published mixture of recurrent layers and attention.

    Args:
        name: Key in `PATTERNS`.
        title: Its authors' name for it.
        rule: The order of the layers, by their names in `deltarule.nn.MIXERS`.
        layers: Gives the mixer of each layer for a number of layers.
        source: Paper and section.
    """

    name: str
    title: str
    rule: str
    layers: Callable[[int], tuple[str, ...]]
    source: str


def repeated(order: str) -> Callable[[int], tuple[str, ...]]:
    names = tuple(order.split())

    def layers(num_layers: int) -> tuple[str, ...]:
        said = f"num_layers must be a multiple of {len(names)} for ({', '.join(names)})"
        check_that(num_layers % len(names) == 0, said, num_layers)
        return names * (num_layers // len(names))

    return layers


def with_two_global(num_layers: int) -> tuple[str, ...]:
    said = "num_layers must be even and 4 or more for deltanet with two layers of attention"
    fits = num_layers % 2 == 0 and num_layers >= 4
    check_that(fits, f"{said}, the second and the (N / 2 + 1)-th", num_layers)
    attention = (1, num_layers // 2)
    return tuple("attention" if i in attention else "deltanet" for i in range(num_layers))


def in_words(order: str) -> str:
    """Such as "3 x kda, attention in turns"."""
    runs = [(name, len([*same])) for name, same in groupby(order.split())]
    return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in runs) + " in turns"


# Those that repeat an order: name, title, order and source.
_ORDERS = (
    ("deltanet_sliding_window", "DeltaNet + sliding-window attention", "deltanet sliding_window",
     "arXiv 2406.06484, section 3.4"),
    ("gated_deltanet_h1", "Gated DeltaNet-H1", "gated_deltanet sliding_window",
     "arXiv 2412.06464, section 3.4"),
    ("gated_deltanet_h2", "Gated DeltaNet-H2", "mamba2 gated_deltanet sliding_window",
     "arXiv 2412.06464, section 3.4"),
    ("gdn_swa_mamba2", "Gated DeltaNet + sliding-window attention + Mamba-2",
     "gated_deltanet sliding_window mamba2", "arXiv 2412.06464, table S.2"),
    ("gdn_mamba2_swa", "Gated DeltaNet + Mamba-2 + sliding-window attention",
     "gated_deltanet mamba2 sliding_window", "arXiv 2412.06464, table S.2"),
    ("mamba2_swa_gdn", "Mamba-2 + sliding-window attention + Gated DeltaNet",
     "mamba2 sliding_window gated_deltanet", "arXiv 2412.06464, table S.2"),
    ("samba", "Samba", "mamba1 sliding_window", "arXiv 2406.07522, section 2.1"),
    ("minimax01", "MiniMax-01", "lightning " * 7 + "attention", "arXiv 2501.08313, section 2"),
    ("qwen3_next", "Qwen3-Next", "gated_deltanet " * 3 + "attention",
     "Qwen3-Next-80B-A3B, model card of September 2025"),
    ("kimi_linear", "Kimi Linear", "kda " * 3 + "attention", "arXiv 2510.26692, section 4"),
)  # fmt: skip
_PATTERNS = (
    Pattern(
        "deltanet_global_attention", "DeltaNet + global attention",
        "deltanet, with attention in the second layer and the (N / 2 + 1)-th of N",
        with_two_global, "arXiv 2406.06484, section 3.4",
    ),
    *(Pattern(name, title, in_words(order), repeated(order), source)
      for name, title, order, source in _ORDERS),
)  # fmt: skip

PATTERNS = Named({pattern.name: pattern for pattern in _PATTERNS})


def expand_layer_types(given: str | Sequence[str], num_layers: int) -> tuple[str, ...]:
    """Look up a published pattern, or repeat the names over all layers, each known."""
    alone = given[0] if isinstance(given, Sequence) and len(given) == 1 else given
    if isinstance(alone, str) and alone in PATTERNS:
        return PATTERNS[alone].layers(num_layers)
    for name in (layers := repeat("layer_types", given, num_layers)):
        parts = name.split("+") if isinstance(name, str) else [name]
        if not all(part in (*MIXERS, *MLP_PARTS) for part in parts):
            if isinstance(name, str) and name in PATTERNS:
                raise ValueError(
                    f"layer_types must be {name!r} alone: it is a pattern of layers, not the name "
                    "of one"
                )
            hint = nearest(name, [*MIXERS, *PATTERNS], before=": ")
            hint = ": give each name apart" if "," in str(name) else hint
            raise ValueError(
                f"layer_types names an unknown layer {name!r}{hint}; "
                f"known: {', '.join([*MIXERS, *MLP_PARTS])}, or several joined by +; "
                f"patterns: {', '.join(PATTERNS)}"
            )
        if len({*parts}) < len(parts):
            raise ValueError(f"layer_types names a part twice in one block: {name!r}")
    return layers


def repeat(name: str, given: str | Sequence[str], num_layers: int) -> tuple[str, ...]:
    """One word, or a pattern of words that divides the layers, over all of them."""
    pattern = (given,) if isinstance(given, str) else given
    fits = isinstance(pattern, Sequence) and bool(pattern)
    check_that(fits, f"{name} must be a name or a tuple of names", given)
    if num_layers % len(pattern):
        raise ValueError(
            f"{name} is a pattern of {len(pattern)} names, which does not divide "
            f"num_layers={num_layers}"
        )
    return (*pattern,) * (num_layers // len(pattern))
