"""Experts in a checkpoint: their matrices, together or apart."""

from collections.abc import Iterator

from deltarule.models.config import ModelConfig
from deltarule.models.convert.piece import Has, Piece, renamed


def expert_pieces(
    theirs: str,
    ours: str,
    config: ModelConfig,
    has: Has,
    apart: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    together: tuple[str, str] = ("gate_up_proj", "down_proj"),
) -> Iterator[Piece]:
    """Matrices of all experts in one tensor each, if they are stored so, or each on its own."""
    own = f"{ours}up_proj", f"{ours}down_proj"
    if has(theirs + together[0]):
        yield from renamed(theirs, "", dict(zip(together, own, strict=True)))
        return
    inner, hidden = config.moe_intermediate_size or 0, config.hidden_size
    *into, out = apart
    for parameter, names, size in ((own[0], into, inner), (own[1], [out], hidden)):
        for index in range(config.num_experts):
            for place, name in enumerate(names, index * len(names)):
                rows = place * size, (place + 1) * size
                yield Piece(f"{theirs}{index}.{name}.weight", (parameter,), rows=rows)
