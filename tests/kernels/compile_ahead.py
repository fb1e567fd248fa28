"""Compile the step kernel for a GPU that need not be here; print what it uses as JSON.

A program of its own: Triton's interpreter, in which the tests run, cannot be left again.
"""

import itertools
import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deltarule.kernels.triton import recurrent_step as step


def compile_step(erase: str, capability: int) -> dict[str, int]:
    """Registers, spills and shared memory of the kernel at 16/32 heads and 128 channels."""
    kernel = step.recurrent_step_kernel
    constants = {
        "H": 16, "HV": 32, "K": 128, "V": 128, "N_STEPS": 1, "DECAY": "head", "ERASE": erase,
        "UNIT_NORM": erase == "tied", "INDEXED": True, "BK": 128, "BV": step.ROWS,
    }  # fmt: skip
    constants |= dict.fromkeys({"tied": ("a", "b"), "free": ("beta",)}[erase])
    types = dict.fromkeys(("q", "k", "v", "o", "a", "b"), "*bf16") | {"scale": "fp32"}
    types |= dict.fromkeys(("beta", "log_decay", "state"), "*fp32") | {"state_indices": "*i32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(
        ASTSource(kernel, signature, constants),
        target=target,
        options={**step.OPTIONS, "num_warps": 2},
    )
    return resources(compiled.asm["cubin"])


def resources(cubin: bytes) -> dict[str, int]:
    """What the assembler says of a binary: REG, STACK, SHARED and LOCAL (spills)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", text)}


if __name__ == "__main__":
    cases = itertools.product(("tied", "free"), (80, 86, 89, 90, 100, 120))
    print(json.dumps([[erase, target, compile_step(erase, target)] for erase, target in cases]))
