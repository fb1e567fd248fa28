"""The figures that the kernels are to reach on an H200, and how far a report is from them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bench.adapters import OURS
from bench.cases import LONG, OPERATIONS, PRODUCT, SERVING, SHAPES, SHORT, TINY, TRAIN
from bench.results import PASSES, find
from bench.worker import BOTH, FORWARD

Row = dict[str, Any]
Reading = Callable[[Row, str], float | None]

# Against whom a ratio is taken. FlashInfer, which has no backward pass, is reported beside.
RIVALS = ("fla", "fla-triton", "flash_qla")
# Level with the best rival: at least as fast.
LEVEL = 1.0


class Target(NamedTuple):
    """A figure to reach.

    what: For a reader.
    read: (report, peer) -> the figure, or None where it was not measured.
    unit: Of the figure.
    ratio: How much better than the best rival at the least. None: no ratio is asked.
    bound: A number that is not to be passed. None: none.
    more: Whether a larger figure is better.
    """

    what: str
    read: Reading
    unit: str
    ratio: float | None = None
    bound: float | None = None
    more: bool = False


class Verdict(NamedTuple):
    """A target and what a report says about it; None where nothing was measured."""

    target: Target
    ours: float | None
    rival: str | None
    theirs: float | None

    @property
    def ratio(self) -> float | None:
        """How many times better than the best rival."""
        if self.ours is None or self.theirs is None:
            return None
        return self.ours / self.theirs if self.target.more else self.theirs / self.ours

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None if that cannot be said."""
        if self.ours is None:
            return None
        if self.target.bound is not None:
            return self.ours <= self.target.bound
        if self.ratio is None or self.target.ratio is None:
            return None
        return self.ratio >= self.target.ratio


def timed(operation: str, shape: str, name: str) -> Reading:
    """Milliseconds of a pass in a CUDA graph."""

    def read(report: Row, peer: str) -> float | None:
        row = find(report, kind="time", peer=peer, operation=operation, shape=shape)
        return row.get(name, {}).get("graph_ms")

    return read


def extra_memory(report: Row, peer: str) -> float | None:
    """MiB of a gated forward and backward pass at the shape of training."""
    row = find(report, kind="time", peer=peer, operation="gdn", shape=TRAIN)
    return row.get(BOTH, {}).get("extra_MiB")


def single(kind: str, operation: str, shape: str, key: str) -> Reading:
    """A figure of a row that has one."""

    def read(report: Row, peer: str) -> float | None:
        return find(report, kind=kind, peer=peer, operation=operation, shape=shape).get(key)

    return read


def trained(key: str) -> Reading:
    """A figure of the language model's training steps at 8x4096."""

    def read(report: Row, peer: str) -> float | None:
        rows = [row for row in report["rows"] if row["kind"] == "model" and row["peer"] == peer]
        return next((row.get(key) for row in rows if row["batch"] == 8), None)

    return read


def pass_target(operation: str, shape: str, name: str, ratio: float) -> Target:
    """A ratio of times."""
    title = f"{OPERATIONS[operation].title}, {PASSES[name]}, {SHAPES[shape].label}"
    return Target(title, timed(operation, shape, name), "ms", ratio=ratio)


TARGETS = (
    pass_target("gdn", TRAIN, FORWARD, 1.1),
    pass_target("gdn", TRAIN, BOTH, LEVEL),
    pass_target("gdn", LONG, BOTH, LEVEL),
    *(
        pass_target("gdn", shape, FORWARD, LEVEL)
        for shape in (*(name for name in SERVING if name != "1x8192-h16/32"), SHORT)
    ),
    pass_target("delta", TRAIN, FORWARD, 2.5),
    pass_target("delta", TRAIN, BOTH, 2.2),
    pass_target("kda", TRAIN, FORWARD, 2.5),
    pass_target("kda", TRAIN, BOTH, 4.0),
    pass_target("product2", PRODUCT, BOTH, 2.0),
    pass_target("gated_product2", PRODUCT, BOTH, 2.0),
    pass_target("simple_gla", TRAIN, FORWARD, 1.5),
    pass_target("decode", "decode-1", FORWARD, LEVEL),
    *(pass_target("decode", f"decode-{batch}", FORWARD, 1.2) for batch in (32, 128, 256)),
    *(
        Target(
            f"{OPERATIONS[name].title}, host time of one forward call, 1x64",
            single("overhead", name, TINY, "host_us"), "us", bound=60.0,
        )
        for name in ("delta", "gdn")
    ),
    *(
        Target(
            f"{OPERATIONS[name].title}, first forward and backward call, empty caches",
            single("cold", name, TRAIN, "seconds"), "s", bound=10.0,
        )
        for name in ("delta", "gdn", "kda")
    ),
    Target("gated delta rule, extra memory, forward + backward, 8x4096, 16/16, 128",
           extra_memory, "MiB", bound=854.0),
    Target("1.3 B DeltaNet, training, 8x4096", trained("tokens_per_s"), "tokens/s", ratio=1.3,
           more=True),
    Target("1.3 B DeltaNet, peak memory, 8x4096", trained("peak_GiB"), "GiB", ratio=1.0),
)  # fmt: skip


def verdict(target: Target, reports: Sequence[Row]) -> Verdict:
    """What the newest report that measured both sides says, else the newest that measured us.

    A ratio is taken within one report only: machines differ from day to day.
    """
    newest_first = sorted(reports, key=lambda report: str(report["date"]), reverse=True)
    verdicts = [judged(target, report) for report in newest_first]
    ours_alone = [each for each in verdicts if each.ours is not None]
    both = [each for each in ours_alone if each.theirs is not None]
    theirs_alone = [each for each in verdicts if each.theirs is not None]
    nothing = Verdict(target, None, None, None)
    return next(iter([*both, *ours_alone, *theirs_alone, nothing]))


def judged(target: Target, report: Row) -> Verdict:
    """Our figure in a report, and that of the best rival."""
    read = {peer: target.read(report, peer) for peer in RIVALS}
    found = {peer: figure for peer, figure in read.items() if figure is not None}
    best = max if target.more else min
    rival = best(found, key=lambda peer: found[peer]) if found else None
    return Verdict(target, target.read(report, OURS), rival, found.get(rival) if rival else None)
