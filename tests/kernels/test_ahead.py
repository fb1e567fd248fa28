"""What the compiler makes of the kernels for GPUs that are not here: what fits, spills, is lost."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from promised import promised

promised("triton")

# KiB of shared memory that one block may have.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# Columns of a multiprocessor of sm_100.
TENSOR_MEMORY = 512
# Bytes a thread that may spill, at most, by kernel; of what is not named here, by bytes an element.
# Triton 3.7.1 spills the most: 1312 bytes.
SPILLS = {"gradients_kernel": 1536, "recurrent_step_kernel": 16}
SPILLS_OF_OTHERS = {"bfloat16": 256, "float16": 256, "float32": 1024}


def compiled(program: str, *options: object) -> list[dict]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(program)), *map(str, options)],
        env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(report: dict, spills: int, shared: int | None = None) -> None:
    """In KiB of shared memory: all that there is, unless it is said."""
    assert report["shared"] <= (shared or SHARED[report["target"]]) * 1024, report
    assert report["spills"] <= spills, report
    assert report["tensor_memory"] <= TENSOR_MEMORY, report
    assert report["serialised"] == 0, report
    assert report["overwritten"] == [], report
    assert report["target"] != 90 or report["barriers"] == 0, report


def test_a_few_calls_for_every_gpu() -> None:
    reports = compiled("compile_ahead.py")
    assert {report["target"] for report in reports} == set(SHARED)
    names = {report["kernel"] for report in reports}
    assert {"next_state_kernel", "gradients_kernel", "recurrent_step_kernel"} <= names
    for report in reports:
        check(report, SPILLS.get(report["kernel"], SPILLS_OF_OTHERS[report["call"]["dtype"]]))
        if report["kernel"] == "recurrent_step_kernel":
            # Eight programs of 64 threads on a multiprocessor of 64 K registers.
            assert report["registers"] <= 128, report
            assert report["shared"] <= 4096, report


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED)
def test_every_call(target) -> None:
    reports = compiled("compile_ahead.py", "--kind", "long", "--targets", target)
    assert len(reports) > 60
    for report in reports:
        wide = report["call"]["key_size"] > 128 or report["call"]["dtype"] == "float32"
        check(report, 8192 if wide else 4096)


# Those that give a thread the most registers come in every run.
@pytest.mark.parametrize(
    "targets", [(80, 120), pytest.param((86, 89, 90, 100), marks=pytest.mark.slow)]
)
def test_steps_with_logits_and_on_pools(targets) -> None:
    reports = compiled("compile_ahead.py", "--kind", "steps", "--targets", *targets)
    assert len(reports) == 4 * 5 * len(targets)
    for report in reports:
        check(report, 16, 4)
        # Eight programs on a multiprocessor of 64 K registers.
        assert report["registers"] * report["threads"] * 8 <= 64 * 1024, report


# ---- the fused kernels of the delta rule ---------------------------------------------------------

# Bytes a thread that may spill: of whole chunks, and of forwards whose last chunk may be ragged;
# gradients where chunks may be. Triton 3.7.1 spills 224 and 128 at most in forwards, 3.6.0 144
# where they are ragged, and with a decay per channel 224, and 256 where these are ragged and save;
# for sm_100, where nobody has run them, forwards may spill 352.
FUSED = {"whole": 224, "ragged": 144, "gradients": 224, "backward": 120}
FUSED_BY_CHANNEL = {"whole": 224, "ragged": 256, "channels": 16}
PASSES = {
    "forwards": (
        "gated 128 bare alone whole forward", "gated 128 bare alone packed twice",
        "gated 128 bare parts whole save", "gated 64 unit parts packed gradients",
        "gated 96 unit parts whole save", "gated 96 unit alone packed forward",
        "kda 128 bare alone whole forward", "gla 128 unit alone packed forward",
        "kda 128 unit alone packed save", "gla 128 bare alone whole save",
    ),
    "backwards": (
        "gated 128 unit alone ragged backward", "delta 128 bare alone packed backward",
        "decay 128 bare alone whole backward", "plain 128 unit alone whole backward",
        "gated 96 unit alone ragged backward", "gated 128 bare alone whole lend",
        "gated 128 bare alone whole borrow", "decay 128 unit alone whole borrow",
    ),
    "scans": ("gated 256 bare alone whole leaving", "gated 256 bare alone packed through",
              "delta 256 bare alone ragged back", "delta 256 bare alone packed gradients"),
    "segments": (
        "gated 128 unit alone whole ends", "gated 128 bare alone whole outputs",
        "gated 128 bare alone whole narrow_outputs", "gated 128 unit alone whole ends_back",
        "gated 128 bare alone whole scores", "gated 128 bare alone whole corrections",
        "gated 128 bare alone whole making_outputs", "gated 128 bare alone whole later_ends",
        "gated 128 bare alone whole first_outputs", "gated 128 bare alone whole halved_ends",
        "gated 128 bare alone whole starts", "gated 128 bare alone whole wide_starts",
        *(f"kda 128 bare alone whole {x}" for x in ("ends", "narrow_outputs", "ends_back")),
    ),
    "channels": ("kda 128 bare alone whole channels", "gla 128 unit alone packed channels"),
    # Every form of whole chunks, of which there are 40, and of the others some.
    "gradients": (
        "whole gradients", "gated 128 bare alone packed gradients",
        "gated 128 unit grouped ragged gradients", "plain 64 bare alone packed gradients",
    ),
}  # fmt: skip


def check_fused(reports: list[dict], count: int) -> None:
    assert len(reports) == count
    for report in reports:
        words = report["call"].split()
        kind = "ragged" if {"ragged", "packed"} & {*words} else "whole"
        if words[-1] in ("backward", "borrow", "channels") or (words[-1], kind) == (
            "gradients",
            "ragged",
        ):
            kind = words[-1].replace("borrow", "backward")
        spills = (FUSED_BY_CHANNEL if words[0] in ("kda", "gla") else FUSED)[kind]
        check(report, 352 if report["target"] == 100 and kind in ("whole", "ragged") else spills)


@pytest.mark.parametrize("kind", PASSES)
def test_fused_kernels_keep_their_products_in_flight(kind) -> None:
    names = PASSES[kind]
    count = len(names) + (39 if kind == "gradients" else 0)
    check_fused(compiled("compile_gluon.py", "--targets", 90, "--calls", *names), count)


def test_on_sm_100_sums_lie_in_tensor_memory() -> None:
    names = [f"gated 128 bare alone whole {x}" for x in ("forward", "twice", "save")]
    reports = compiled("compile_gluon.py", "--targets", 100, "--calls", *names)
    check_fused(reports, len(names))
    assert all(report["tensor_memory"] > 0 for report in reports)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "count"), [(90, 421), (100, 168)])
def test_every_form_keeps_its_products_in_flight(target, count) -> None:
    check_fused(compiled("compile_gluon.py", "--targets", target), count)


# ---- the operators beside the delta rule ---------------------------------------------------------

# Bytes of a thread that go to memory: the gradients of a memory go from product to product, and
# each has operands that fill half of the registers; a scan with every gate at once has no source;
# sLSTM with heads of 256 channels holds four gates and four numbers of 16 x 256 each.
SPILLS_OF_OPERATORS = {
    "network_scan_kernel": 512, "network_read_backward_kernel": 512, "network_backward_kernel": 640,
    "held_scan_kernel": 288, "read_kernel": 16,
    "slstm_forward_kernel": 160, "slstm_backward_kernel": 512, "split_forward_kernel": 16,
}  # fmt: skip
SPILLS_OF_ALL_GATES = 256
# A row of 128 channels, split for products in tf32, fills half of the registers by itself.
SPILLS_OF_WIDE_NETWORKS = 2048
# Kernels that run only on some of the architectures, by what their calls' names hold: those of
# `ttt` and `titans`, sLSTM where heads are split, products of a few rows.
ONLY = {"TTT": (90, 100), "Titans": (90, 100), "split": (80, 90, 100), "few rows": (90,)}
# KiB that a block has there; the small architectures have 99, and run several blocks.
SHARED_OF_ONLY = {"split": 144, "few rows": 144}


def check_operators(reports: list[dict], least: int) -> None:
    assert len(reports) >= least
    for report in reports:
        kind = next((kind for kind in ONLY if kind in report["call"]), "")
        if report["target"] in ONLY.get(kind, (report["target"],)):
            spills = SPILLS_OF_OPERATORS.get(report["kernel"], 0)
            spills = SPILLS_OF_ALL_GATES if "all" in report["call"] else spills
            if re.search("K 128, .* inside", report["call"]):
                spills = SPILLS_OF_WIDE_NETWORKS
            check(report, spills, SHARED_OF_ONLY.get(kind, 64))


@pytest.mark.parametrize(
    "call",
    [
        "scan, Mamba, V 1536, K 16, torch.bfloat16", "mesa, C 64, K 128",
        "sLSTM, D 64, torch.float32", "sLSTM split, D 256, torch.bfloat16",
        "TTT, K 64, 256 inside, packed", "few rows",
    ],
)  # fmt: skip
def test_operators_on_hopper(call) -> None:
    check_operators(compiled("compile_operators.py", "--targets", 90, "--calls", call), 1)


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED)
def test_operators_on_every_gpu(target) -> None:
    check_operators(compiled("compile_operators.py", "--targets", target), 40)


@pytest.mark.parametrize(
    "targets", [(80, 100), pytest.param((86, 89, 90, 120), marks=pytest.mark.slow)]
)
def test_neighbours_spill_nothing(targets) -> None:
    reports = compiled("compile_operators.py", "--calls", "fused", "--targets", *targets)
    assert len({report["kernel"] for report in reports} - {"few_rows_kernel"}) == 19
    for report in reports:
        assert report["spills"] == 0, report
        # Products of a few rows are for Hopper alone, where they fill a processor.
        if report["kernel"] != "few_rows_kernel":
            check(report, 0, 4)
            # Of a multiprocessor of 64 K registers: 12 warps, or three programs of 8.
            assert report["registers"] <= (80 if "entropy" in report["kernel"] else 168), report
