"""Compile recorded launches of Triton kernels for GPUs that need not be here; print JSON lines.

The programs beside this file are run by themselves: Triton's interpreter, in which the tests run,
cannot be left again.
"""

import argparse
import contextlib
import io
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from machine_code import lost_addresses, overwritten_operands, single_buffers
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

OPTIONS = (
    "num_warps", "num_stages", "enable_fp_fusion", "maxnreg", "launch_cooperative_grid",
)  # fmt: skip
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
DIVISIBLE = [["tt.divisibility", 16]]
TARGETS = (80, 86, 89, 90, 100, 120)
# What the assembler says where it takes the overlap out of asynchronous products.
SERIALISED = re.compile(r"C75(?:1[0-2])")


class Launch(NamedTuple):
    """What the compiler is given of one launch."""

    kernel: JITFunction
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[object]]]
    options: dict[str, Any]


# From a target: calls, by names or by what they are, and their launches once they are asked for.
Calls = Callable[[int], Iterable[tuple[object, Callable[[], Iterable[Launch]]]]]


class Report(NamedTuple):
    """What came out: registers of a thread, bytes, warnings of wgmma put in series, hazards.

    `barriers` are those that are never invalidated, for whose memory the compiler has other uses.
    A kernel for which tensor memory is too small, in columns, is nothing but a trap.
    """

    registers: int
    spills: int
    shared: int
    tensor_memory: int
    serialised: int
    overwritten: list[str]
    barriers: int
    seconds: float


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Launches inside are kept instead of run; their outputs stay as they were allocated."""
    launches: list[Launch] = []
    run = JITFunction.run

    def record(self: JITFunction, *args: Any, **named: Any) -> None:
        launches.append(describe(self, args, named))

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


def describe(kernel: JITFunction, args: tuple[Any, ...], named: dict[str, Any]) -> Launch:
    """Types, constants and divisibility as Triton derives them from the arguments of a launch."""
    options = {name: named.pop(name) for name in OPTIONS if name in named}
    values = dict(zip(kernel.arg_names, args, strict=False)) | named
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values.get(parameter.name, parameter.default if parameter.has_default else None)
        kind = type_of(value, parameter.is_constexpr, parameter.do_not_specialize)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif not parameter.do_not_specialize and (
            kind.startswith("*") or (kind == "i32" and value % 16 == 0)
        ):
            attributes[(index,)] = DIVISIBLE
    return Launch(kernel, signature, constants, attributes, options)


def type_of(value: Any, is_constant: bool, is_general: bool) -> str:
    """A parameter's type in a signature."""
    if is_constant or value is None:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    # A step of one element is a constant to Triton.
    if type(value) is int and value == 1 and not is_general:
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        return "i32"
    # Gluon says where a tile's elements lie.
    layout = f",{value.layout}" if hasattr(value, "layout") else ""
    return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}{layout}>"


def compiled(launch: Launch, capability: int) -> Report:
    """Compile a launch for sm_<capability> and take the result apart."""
    kind = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    source = kind(launch.kernel, launch.signature, launch.constants, launch.attributes)
    # The assembler's remarks are printed only as it works, never from the cache.
    knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
    start, log = time.perf_counter(), io.StringIO()
    with contextlib.redirect_stdout(log):
        binary = triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options=launch.options
        )
    seconds = time.perf_counter() - start
    # Other architectures have no products that the assembler could put in series.
    assert capability != 90 or "Used " in log.getvalue(), "the log is not where it was"
    used = resources(binary.asm["cubin"])
    overwritten = []
    if capability == 90:
        listing = tool("nvdisasm", ["-c"], binary.asm["cubin"])
        overwritten = overwritten_operands(listing) + lost_addresses(listing)
        # A Gluon kernel says itself how many tiles there are, and its barriers who waits.
        if not launch.kernel.is_gluon():
            overwritten += single_buffers(binary.asm["ttgir"])
    made, ended = (binary.asm["ptx"].count(f"mbarrier.{x}.shared") for x in ("init", "inval"))
    return Report(
        used["REG"], max(used["STACK"], used["LOCAL"]), binary.metadata.shared,
        binary.metadata.tmem_size,
        len(SERIALISED.findall(log.getvalue())), overwritten, made - ended, seconds,
    )  # fmt: skip


def resources(cubin: bytes) -> dict[str, int]:
    """What the assembler says of a binary: REG, STACK (spills too), SHARED and LOCAL."""
    text = tool("cuobjdump", ["--dump-resource-usage"], cubin)
    used: dict[str, int] = {}
    # A listing may have several functions.
    for name, value in re.findall(r"([A-Z]+):(\d+)", text):
        used[name] = max(used.get(name, 0), int(value))
    return used


def tool(name: str, options: list[str], cubin: bytes) -> str:
    """What one of the tools that come with Triton says of a binary."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(path), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(**kinds: Calls) -> None:
    """Print one JSON object a line for each different launch of the calls of a kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=kinds, default=next(iter(kinds)))
    parser.add_argument("--targets", type=int, nargs="+", default=TARGETS)
    parser.add_argument(
        "--calls", nargs="+", default=[""], help="only those that hold one of these"
    )
    options = parser.parse_args()
    for capability in options.targets:
        for call, launches in kinds[options.kind](capability):
            if not any(words in str(call) for words in options.calls):
                continue
            for launch in {repr(launch): launch for launch in launches()}.values():
                found = {"target": capability, "call": call, "kernel": launch.kernel.__name__}
                found["threads"] = 32 * launch.options["num_warps"]
                report = compiled(launch, capability)._asdict()
                print(json.dumps(found | report), flush=True)
