"""The benchmark of several GPUs in its tiny form: every case runs, and counts what leaves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.several_gpus import CASES
from bench.travel import COLLECTIVES, GATHER, REDUCE

ROOT = Path(__file__).parents[2]


def test_every_case_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "bench.several_gpus", "--out", str(tmp_path / "out.json"), "--steps", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    found = {row["case"]: row for row in rows}
    assert list(found) == list(CASES)
    assert all(case["step_ms"] > 0 for case in found.values())
    ours, theirs = (
        found[f"sharded, {name}"]["sent_mb"] for name in ("weights kept", "gradients in float32")
    )
    # Of the embedding alone gradients leave in float32, of blocks in half the bytes.
    assert theirs[REDUCE] - ours[REDUCE] == pytest.approx(2 * ours["all_to_all_single"], abs=1e-5)
    assert ours[GATHER] == theirs[GATHER] > 0
    assert not found["alone"]["sent_mb"]
    row = found["context and shards, one row, weights kept"]["sent_mb"]
    assert row["all_gather"] > 0
    assert row["batch_isend_irecv"] > 0
    assert set(row) <= {*COLLECTIVES, "batch_isend_irecv"}
