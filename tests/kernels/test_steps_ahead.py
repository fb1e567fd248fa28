"""What the compiler makes of the step with logits, and on pools, for GPUs that are not here."""

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
    "targets", [(80, 120), pytest.param((86, 89, 90, 100), marks=pytest.mark.slow)]
)
def test_steps_with_logits_compile(targets) -> None:
    program = Path(__file__).with_name("compile_steps.py")
    done = subprocess.run(
        [sys.executable, str(program), "--targets", *map(str, targets)],
        env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == 4 * 5 * len(targets)
    for report in reports:
        assert report["spills"] <= 16, report
        # Eight programs on a multiprocessor of 64 K registers.
        assert report["registers"] * report["threads"] * 8 <= 64 * 1024, report
        assert report["shared"] <= 4096, report
