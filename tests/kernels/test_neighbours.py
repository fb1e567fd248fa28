"""What the compiler makes of the kernels beside the recurrence, for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from promised import promised

promised("triton")


# Those that give a thread the most registers come in every run.
@pytest.mark.parametrize(
    "targets", [(80, 100), pytest.param((86, 89, 90, 120), marks=pytest.mark.slow)]
)
def test_compiled_they_spill_nothing(targets) -> None:
    program = Path(__file__).with_name("compile_neighbours.py")
    done = subprocess.run(
        [sys.executable, str(program), "--targets", *map(str, targets)],
        env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    assert len(compiled) == 21 * len(targets)
    for name, target, used in compiled:
        assert used["LOCAL"] == used["STACK"] == 0, (name, target, used)
        # Of a multiprocessor of 64 K registers: 12 warps, or three programs of 8.
        assert used["REG"] <= (80 if "entropy" in name else 168), (name, target, used)
        assert used["SHARED"] <= 4096, (name, target, used)
