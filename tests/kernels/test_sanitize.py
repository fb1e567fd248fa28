"""No kernel reads or writes beside its tensors: compute-sanitizer on a small case of each."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# To be run side by side.
PARTS = 8
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
def test_memcheck(part: int) -> None:
    if shutil.which(SANITIZER) is None:
        pytest.skip(f"{SANITIZER}, which comes with CUDA's toolkit, is not on the PATH")
    # What this compiles, the sanitizer finds in Triton's cache.
    program = [*PROGRAM, str(part), str(PARTS)]
    alone = run(*program, seconds=400)
    assert alone.returncode == 0, alone.stdout[-500:] + alone.stderr[-2000:]
    options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "99"]
    checked = run(SANITIZER, *options, *program, seconds=400)
    said = checked.stdout + checked.stderr
    for reason in UNSUPPORTED:
        if reason in said:
            pytest.skip(f"{SANITIZER}: {reason}")
    assert checked.returncode == 0, said[-4000:]
    assert "ERROR SUMMARY: 0 errors" in said, said[-4000:]
    assert alone.stdout.splitlines()[-1] in checked.stdout
