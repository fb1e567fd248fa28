"""How much a reader of one call has to read: the files that it enters, counted whole.

A call is forward and backward, three times over: the first plans, the second is recorded, a third
may be repeated. The calls on a GPU are those of impl="triton" on sm_80. They run without one: their
kernels in Triton's interpreter, which has no bfloat16 and gives wrong numbers, and around them the
host code that only a GPU enters.
"""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

SOURCE = Path(__file__).parents[1] / "src" / "deltarule"


class Limit(NamedTuple):
    """The most files that a call may enter, and the most lines that they may have."""

    files: int
    lines: int


# What is asked of a call, of the gated one in a file less: these may only fall.
LIMITS = {"cpu": Limit(9, 1900), "gated": Limit(17, 3600), "kda": Limit(20, 3970)}


class Entered:
    """The files of a folder whose functions run, import statements aside."""

    def __init__(self, folder: Path) -> None:
        """Nothing has run yet."""
        self.folder, self.files, self.importing = f"{folder}{os.sep}", set[Path](), 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Take note of a call: what `sys.setprofile` is given."""
        code = frame.f_code
        if code.co_name == "<module>" and event in ("call", "return"):
            self.importing += 1 if event == "call" else -1
        elif event == "call" and not self.importing and code.co_filename.startswith(self.folder):
            self.files.add(Path(code.co_filename))

    def lines(self) -> dict[str, int]:
        """Lines of each file by its name in the folder, the longest first."""
        counts = [(len(x.read_text().splitlines()), x.relative_to(self.folder)) for x in self.files]
        return {str(name): count for count, name in sorted(counts, reverse=True)}


def entered(call: Callable[[], object], folder: Path = SOURCE) -> dict[str, int]:
    """The files that a call enters, with their lines."""
    found = Entered(folder)
    sys.setprofile(found)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found.lines()


def forward_and_backward(delta_rule: Callable[..., Any], impl: str, by_channel: bool) -> None:
    """One call with a decay of each head, or of each key channel (KDA)."""
    q, k, v = torch.randn(3, 1, 128, 2, 16, dtype=torch.bfloat16).unbind()
    beta, log_decay = torch.rand(1, 128, 2), -torch.rand(1, 128, 2, *[16] * by_channel) / 8
    inputs = [x.requires_grad_() for x in (q, k, v, beta, log_decay)]
    out = delta_rule(q, k, v, beta=beta, log_decay=log_decay, normalize_qk=True, impl=impl)
    torch.autograd.grad(out.o.float().square().sum(), inputs)


def taken_for_a_gpu() -> ExitStack:
    """Tensors of the CPU count as those of an sm_80 inside, of which nothing is known yet."""
    from deltarule.ops.delta_rule import implementations
    from deltarule.ops.delta_rule.triton import tile_sizes
    from deltarule.ops.runtime import launch, machine, replay

    machine.failures.cache_clear()
    able = implementations.IMPLEMENTATIONS["triton"]._replace(why_not=lambda call: None)
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    inside = ExitStack()
    for change in (
        patch.object(tile_sizes, "INTERPRETED", 80),
        patch.dict(implementations.IMPLEMENTATIONS, {"triton": able}),
        patch.object(launch, "driver", SimpleNamespace(active=active)),
        patch.object(replay, "driver", SimpleNamespace(active=active)),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        patch.object(Tensor, "is_cuda", True),
    ):
        inside.enter_context(change)
    return inside


def counted(name: str) -> dict[str, int]:
    """The files of one of the calls, with their lines."""
    # The package imports its names when the first of them is asked for.
    from deltarule import delta_rule

    on_gpu, by_channel = name != "cpu", name == "kda"

    def calls() -> None:
        for _ in range(3):
            forward_and_backward(delta_rule, "triton" if on_gpu else "auto", by_channel)

    with taken_for_a_gpu() if on_gpu else nullcontext():
        return entered(calls)


def main() -> int:
    """Print what each call enters; 1 if that is more than its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("calls", nargs="*", choices=[[], *LIMITS], help="these calls only")
    parser.add_argument("--files", action="store_true", help="name the files")
    options = parser.parse_args()
    # Read when a kernel is defined, which is when a first call imports it.
    os.environ["TRITON_INTERPRET"] = "1"
    excess = False
    for name in options.calls or LIMITS:
        files, limit = counted(name), LIMITS[name]
        lines = sum(files.values())
        print(f"{name}: {len(files)} of {limit.files} files, {lines} of {limit.lines} lines")
        excess |= len(files) > limit.files or lines > limit.lines
        for file, count in files.items() if options.files else ():
            print(f"  {count:5} {file}")
    return excess


if __name__ == "__main__":
    sys.exit(main())
