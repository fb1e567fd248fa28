"""`deltarule bench`: our operators and those of installed peers, side by side on one GPU."""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from bench import adapters, cpu, model, results
from bench.cases import CHECKED, CHECKED_STEP, OPERATIONS, SHAPES, TINY, TRAIN, pick
from bench.report import draw_figure, tables, timings
from bench.worker import Setting, attempt
from deltarule.ops.dispatch import Impl
from deltarule.processes import each_apart

Row = dict[str, Any]
Measure = Literal["time", "error", "overhead", "cold"]

# Passes of next to nothing: what is left is Python and launches.
HOST_BOUND = ("delta", "gdn", "kda", "simple_gla")
GPU_REPEATS, CPU_REPEATS = 20, 5


@dataclass(frozen=True)
class BenchRun:
    """Time the operators on a GPU beside installed peers, or on the CPU beside transformers."""

    op: tuple[str, ...] = ()
    """Only these: delta gdn kda simple_gla gla product2 gated_product2 dplr softmax decode."""
    shape: tuple[str, ...] = ()
    """Only shapes of these names, or with these in their names: 8x4096-h16, h16/64, decode."""
    peer: tuple[str, ...] = ()
    """Only these: deltarule fla fla-triton flash_qla flashinfer torch; default: installed ones."""
    measure: tuple[Measure, ...] = ("time", "error", "overhead")
    """What to measure; cold is the first call of a process with empty compilation caches."""
    forward_only: bool = False
    """Leave out the backward pass."""
    quick: bool = False
    """One or two shapes for each operator."""
    impl: Impl = "auto"
    """Our implementation."""
    repeats: int | None = None
    """Timed runs, of which the median counts; None is 20, and 5 on the CPU."""
    limit: float = 240.0
    """Seconds after which a case is given up: some peers tune themselves for minutes."""
    output: Path = Path("bench.json")
    """Raw figures; the picture goes beside them, as .png."""
    cpu: bool = False
    """Compare with transformers' PyTorch on the CPU; takes --impl, --repeats and --output alone."""


@dataclass(frozen=True)
class ModelBenchRun:
    """Time training steps of a DeltaNet language model of 1.3 B parameters, ours and FLA's."""

    batch: tuple[Literal[16, 8, 2], ...] = (16, 8, 2)
    """Batch rows; a step has 32,768 tokens whatever they are."""
    peer: tuple[Literal["deltarule", "fla"], ...] = ()
    """Only these; default: installed ones."""
    limit: float = 400.0
    """Seconds after which a case is given up."""
    output: Path = Path("bench_model.json")
    """Raw figures."""


def bench(run: BenchRun) -> None:
    if run.cpu:
        if run != BenchRun(cpu=True, impl=run.impl, repeats=run.repeats, output=run.output):
            raise ValueError("--cpu has cases of its own: it takes --impl, --repeats, --output")
        cpu.main(run.output, CPU_REPEATS if run.repeats is None else run.repeats, impl=run.impl)
        return
    plan = {peer: cases_of(run, peer) for peer in chosen_peers(run.peer, adapters.COMPARED)}
    if not any(plan.values()):
        asked = f"--op {' '.join(run.op) or 'any'} at --shape {' '.join(run.shape) or 'any'}"
        how = f"for --measure {' '.join(run.measure)}: leave one of them out"
        raise ValueError(f"nothing to measure: none of {', '.join(plan)} has {asked} {how}")
    need_gpu()
    repeats = run.repeats or GPU_REPEATS
    report = measure(plan, run.impl, repeats, run.limit, run.output)
    picture = run.output.with_suffix(".png")
    draw_figure(timings([report]), picture, str(report["device"]))
    print(f"\nraw figures: {run.output}, picture: {picture}")


def bench_model(run: ModelBenchRun) -> None:
    need_gpu()
    cases = [{"kind": "model", "batch": n, "tokens": model.TOKENS // n} for n in run.batch]
    plan = dict.fromkeys(chosen_peers(run.peer, ("fla",)), cases)
    measure(plan, "auto", GPU_REPEATS, run.limit, run.output)
    print(f"\nraw figures: {run.output}")


def need_gpu() -> None:
    if not torch.cuda.is_available():
        raise ValueError(
            "bench times GPU kernels, and PyTorch sees no CUDA device here; "
            "deltarule bench --cpu compares with transformers on this machine's CPU"
        )


def chosen_peers(given: tuple[str, ...], compared: tuple[str, ...]) -> list[str]:
    """The requested peers; by default this library and the installed ones."""
    if given:
        return pick(given, dict.fromkeys((adapters.OURS, *adapters.PEERS)), "--peer")
    return [adapters.OURS, *(name for name in compared if adapters.installed(name))]


def cases_of(run: BenchRun, peer: str) -> list[Row]:
    """What a peer is to do, the times first."""
    has = adapters.operations_of(peer)
    operations = [name for name in pick(run.op, OPERATIONS, "--op") if name in has]
    shapes = [(name, matching(run, name)) for name in operations]
    return [case for kind in run.measure for one in shapes for case in of_kind(run, kind, *one)]


def matching(run: BenchRun, operation: str) -> list[str]:
    """Shapes of an operation that were asked for: by whole names, else by a part of a name."""
    # A shape that is asked for is not left out for being slow.
    known = OPERATIONS[operation]
    names = known.quick if run.quick and not run.shape else known.shapes
    return [name for name in names if not run.shape or any(fits(x, name) for x in run.shape)]


def fits(asked: str, name: str) -> bool:
    """Whether a word of `--shape` means this shape."""
    if asked in SHAPES:
        return asked == name
    if not any(asked in known for known in SHAPES):
        raise ValueError(f"--shape {asked}: in no name; known: {', '.join(SHAPES)}")
    return asked in name


def of_kind(run: BenchRun, kind: Measure, operation: str, names: list[str]) -> Iterator[Row]:
    """Cases of one kind of one operation; a decoding step has no backward pass.

    Each pass is timed on its own, as a backward pass may hang or crash; calls are at a size that
    keeps the GPU idle, first calls at the shape of training.
    """
    step, forward_only = operation == "decode", run.forward_only or operation == "decode"
    if kind == "time":
        for name in names:
            for backward in (False,) if forward_only else (False, True):
                yield case(kind, operation, SHAPES[name], backward)
    elif kind == "error" and names:
        yield case(kind, operation, CHECKED_STEP if step else CHECKED, not run.forward_only)
    elif kind == "overhead" and operation in HOST_BOUND:
        yield case(kind, operation, SHAPES[TINY], False)
    elif kind == "cold" and TRAIN in names and operation != "softmax":
        yield case(kind, operation, SHAPES[TRAIN], True)


def case(kind: str, operation: str, shape: tuple[Any, ...], backward: bool) -> Row:
    return {"kind": kind, "operation": operation, "shape": list(shape), "backward": backward}


def measure(plan: dict[str, list[Row]], impl: str, repeats: int, limit: float, output: Path) -> Row:
    """Do the cases of every peer, filing each row at once, and print the tables."""
    first, *others = plan
    plan = {first: [{"kind": "ceilings"}, *plan[first]], **{peer: plan[peer] for peer in others}}
    found = (
        (peer, *one)
        for peer, cases in plan.items()
        for one in measured(Setting(peer, impl, "cuda", repeats), cases, limit)
    )
    report = results.file_each(results.new_report(sys.argv[1:]), found, output)
    print("\n".join([*tables([report]), *untold(report)]))
    return report


def untold(report: Row) -> Iterator[str]:
    """Why an operator of which something ran has no table, which begins with our own times."""
    rows = [row for row in report["rows"] if row["kind"] == "time"]
    told = {one.operation for one in timings([report])}
    for name in dict.fromkeys(row["operation"] for row in rows if row["operation"] not in told):
        ours = [row for row in rows if (row["peer"], row["operation"]) == (adapters.OURS, name)]
        passes = [row[x] for row in ours for x in results.PASSES if x in row]
        errors = [one.get("error") or one.get("graph_ms_error", "no time") for one in passes]
        has = name in adapters.operations_of(adapters.OURS)
        why = "--peer leaves deltarule out" if has else "deltarule has no such operator"
        yield f"{name}: no table, nothing of deltarule was timed: {[*errors, why][0]}"


def measured(setting: Setting, cases: list[Row], limit: float) -> Iterator[tuple[Row, Row]]:
    """Every case with its figures, or with the reason why it has none.

    They share a process as long as it lives; cold ones have each a new one, with empty caches.
    """
    known = adapters.PEERS.get(setting.peer)
    own = dict(known.environment) if known else {}
    warm = [case for case in cases if case["kind"] != "cold"]
    cold = [case for case in cases if case["kind"] == "cold"]
    for some in (warm, *([case] for case in cold)):
        with tempfile.TemporaryDirectory() as folder:
            environment = own if some is warm else own | empty_caches(Path(folder))
            work = partial(attempt, setting=setting)
            for done in each_apart(work, some, limit_s=limit, environment=environment):
                yield done.task, {"error": done.error} if done.value is None else done.value


def empty_caches(folder: Path) -> dict[str, str]:
    return {"TRITON_CACHE_DIR": str(folder / "triton"), "TILELANG_CACHE_DIR": str(folder / "tl")}
