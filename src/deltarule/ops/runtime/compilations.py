"""A list of the kernels that Triton compiles or loads."""

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
    found: list[Compiled] = []
    before = knobs.compilation.listener

    def listen(*, src: Any, times: Any, cache_hit: bool, **others: Any) -> None:
        found.append(Compiled(str(src.name), times.total / 1e6, cache_hit))
        if before is not None:
            before(src=src, times=times, cache_hit=cache_hit, **others)

    knobs.compilation.listener = listen
    try:
        yield found
    finally:
        knobs.compilation.listener = before
