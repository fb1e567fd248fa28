"""No kernel goes beside its tensors or races in shared memory: compute-sanitizer on small cases.

racecheck takes the kernels in Triton alone: it does not see the barriers on which the roles of
those in Gluon wait. tests/gluon_interpreter.py tries those.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Options and what is run of each, in parts to be run side by side.
TOOLS = {
    "memcheck": (["--report-api-errors", "no"], []),
    "racecheck": (["--racecheck-report", "analysis"], ["triton"]),
}
PARTS = 8
SUMMARY = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards"}
PROGRAM = [sys.executable, str(Path(__file__).with_name("sanitize.py"))]
SANITIZER = "compute-sanitizer"
# Some virtual machines and containers do not let it at the GPU.
UNSUPPORTED = ("Device not supported", "Unable to find injection library")


def run(*command: str, seconds: float) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=seconds
    )


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer(tool: str, part: int) -> None:
    if shutil.which(SANITIZER) is None:
        pytest.skip(f"{SANITIZER}, which comes with CUDA's toolkit, is not on the PATH")
    # What this compiles, the sanitizer finds in Triton's cache.
    options, kernels = TOOLS[tool]
    program = [*PROGRAM, str(part), str(PARTS), *kernels]
    alone = run(*program, seconds=400)
    assert alone.returncode == 0, alone.stdout[-500:] + alone.stderr[-2000:]
    checked = run(
        SANITIZER, "--tool", tool, *options, "--error-exitcode", "99", *program, seconds=400
    )
    said = checked.stdout + checked.stderr
    for reason in UNSUPPORTED:
        if reason in said:
            pytest.skip(f"{SANITIZER}: {reason}")
    assert checked.returncode == 0, said[-4000:]
    assert SUMMARY[tool] in said, said[-4000:]
    assert alone.stdout.splitlines()[-1] in checked.stdout
