"""Sides of one map on the same inputs: milliseconds of a pass, memory, and how far they are apart.

floor = bytes / bandwidth + operations / matrix rate

Both rates are measured in the same run. The forward pass reads every input once and writes the
output; the backward pass reads inputs and the gradient of the output, and writes a gradient for
each input.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bench import results, timing
from bench.worker import reason

REPEATS = 20
# Longer calls are run once more only: PyTorch takes half a second for some.
LONG_MS = 300


class Case(NamedTuple):
    """One map: its inputs, whoever computes it, and what it takes beyond the bytes of both.

    operations: Of both passes, a third of them forward.
    more_bytes: Of the forward pass and of the backward pass, beside those of the rule.
    captured: Whether calls are timed in a CUDA graph; else as they are launched from Python.
    """

    inputs: Mapping[str, Tensor]
    sides: Mapping[str, timing.Operator]
    operations: int = 0
    more_bytes: tuple[int, int] = (0, 0)
    captured: bool = True

    def milliseconds(self, run: timing.Run) -> float:
        if self.captured:
            return timing.graph_ms([run], REPEATS)
        once = min(timing.event_times([run], 2))
        return once if once > LONG_MS else timing.eager_ms([run], REPEATS)

    def floor_ms(self, o: Tensor, both: bool, bandwidth: float, rate: float) -> float:
        read, (more, more_back) = sum(x.nbytes for x in self.inputs.values()), self.more_bytes
        moved = read + o.nbytes + more + both * (2 * read + o.nbytes + more_back)
        return 1e3 * (moved / bandwidth + self.operations / (1 if both else 3) / rate)


def run_cases(
    program: str, about: str | None, kind: str, cases: Mapping[str, Callable[[], Case]]
) -> None:
    """Run a program of this folder that needs a GPU: each case is made when its turn comes.

    `--output` is the file for its report; the first line of `about` is what it says of itself.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=None, help="file for the raw figures")
    output = parser.parse_args().output
    if not torch.cuda.is_available():
        raise ValueError(f"{program} needs a CUDA device, and PyTorch sees none")
    report = results.new_report(sys.argv[1:], f"python -m {program}")
    rates = timing.copy_bandwidth(), timing.matrix_rate()
    report["ceilings"] = {"copy_TB_s": rates[0] / 1e12, "matrix_TFLOP_s": rates[1] / 1e12}

    def found() -> Iterator[results.Found]:
        for name, make in cases.items():
            for side, passed, row in figures(make(), *rates):
                yield side, {"kind": kind, "case": name, "pass": passed}, row
            torch.cuda.empty_cache()

    results.file_each(report, found(), output)


def figures(case: Case, bandwidth: float, rate: float) -> Iterator[tuple[str, str, results.Row]]:
    """Each side and pass: forward where no backward follows, and both, gradients by every input.

    `apart`, of both, is the largest relative difference of an output or gradient from that of the
    first side; a side that lacks one of the first's is an error.
    """
    first: dict[str, Tensor] = {}
    for side, run in case.sides.items():
        for both in (False, True):
            try:
                o = timing.outputs(run, case.inputs, None)["o"]
                torch.manual_seed(0)
                weight = torch.randn(o.shape, device=o.device).to(o.dtype) if both else None
                call = partial(timing.outputs, run, case.inputs, weight)
                found = call()
                floor = case.floor_ms(o, both, bandwidth, rate)
                row: results.Row = {"ms": case.milliseconds(call), "floor_ms": floor}
                row["extra_MiB"] = timing.extra_mib(call)
                if both:
                    first = first or found
                    row["apart"] = max(apart(found[name], y) for name, y in first.items())
            # A peer that fails is a figure too.
            except Exception as error:
                row = {"error": reason(error)}
            yield side, "forward+backward" if both else "forward", row


def apart(x: Tensor, y: Tensor) -> float:
    """The norm of x - y relative to that of y, on their device."""
    return ((x.float() - y.float()).norm() / y.float().norm()).item()
