"""Hear of every kernel that Triton compiles, or finds compiled in its cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from triton import knobs


class Compiled(NamedTuple):
    """A kernel, the seconds it took, and whether it lay in Triton's cache already."""

    kernel: str
    seconds: float
    cached: bool


@contextmanager
def compilations() -> Iterator[list[Compiled]]:
    """The kernels that are compiled or loaded inside, as they come to be ready."""
    found: list[Compiled] = []
    before = knobs.compilation.listener

    def listen(
        *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool
    ) -> None:
        found.append(Compiled(str(src.name), times.total / 1e6, cache_hit))
        if before is not None:
            before(
                src=src, metadata=metadata, metadata_group=metadata_group, times=times,
                cache_hit=cache_hit,
            )  # fmt: skip

    knobs.compilation.listener = listen
    try:
        yield found
    finally:
        knobs.compilation.listener = before
