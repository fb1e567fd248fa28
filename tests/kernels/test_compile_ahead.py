"""What the compiler makes of the kernels for six GPUs: what fits, what spills or is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from promised import promised

promised("triton")

from kernels.machine_code import lost_addresses, overwritten_operands, single_buffers

# Shared memory that one block may have, in KiB.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# Columns of a multiprocessor of sm_100.
TENSOR_MEMORY = 512
# Bytes a thread that may spill, at most, by kernel; of what is not named here, by bytes an element.
# Triton 3.7.1 spills the most: 1312 bytes.
SPILLS = {"gradients_kernel": 1536, "recurrent_step_kernel": 16}
OTHERS = {"bfloat16": 256, "float16": 256, "float32": 1024}


def compiled(program: str, *options: object) -> list:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(program)), *map(str, options)],
        env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(report: dict, spills: int) -> None:
    assert report["shared"] <= SHARED[report["target"]] * 1024, report
    assert report["spills"] <= spills, report
    assert report["tensor_memory"] <= TENSOR_MEMORY, report
    assert report["serialised"] == 0, report
    assert report["overwritten"] == [], report


def test_a_few_calls_for_every_gpu() -> None:
    reports = compiled("compile_ahead.py")
    assert {report["target"] for report in reports} == set(SHARED)
    names = {report["kernel"] for report in reports}
    assert {"next_state_kernel", "gradients_kernel", "recurrent_step_kernel"} <= names
    for report in reports:
        check(report, SPILLS.get(report["kernel"], OTHERS[report["call"]["dtype"]]))
        if report["kernel"] == "recurrent_step_kernel":
            # Eight programs of 64 threads on a multiprocessor of 64 K registers.
            assert report["registers"] <= 128, report
            assert report["shared"] <= 4096, report


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED)
def test_every_call(target) -> None:
    reports = compiled("compile_ahead.py", "--long", "--targets", target)
    assert len(reports) > 60
    for report in reports:
        wide = report["call"]["key_size"] > 128 or report["call"]["dtype"] == "float32"
        check(report, 8192 if wide else 4096)


# Those that give a thread the most registers come in every run.
@pytest.mark.parametrize(
    "targets", [(80, 120), pytest.param((86, 89, 90, 100), marks=pytest.mark.slow)]
)
def test_steps_with_logits_and_on_pools(targets) -> None:
    reports = compiled("compile_steps.py", "--targets", *targets)
    assert len(reports) == 4 * 5 * len(targets)
    for report in reports:
        assert report["spills"] <= 16, report
        # Eight programs on a multiprocessor of 64 K registers.
        assert report["registers"] * report["threads"] * 8 <= 64 * 1024, report
        assert report["shared"] <= 4096, report


@pytest.mark.parametrize(
    "targets", [(80, 100), pytest.param((86, 89, 90, 120), marks=pytest.mark.slow)]
)
def test_neighbours_spill_nothing(targets) -> None:
    reports = compiled("compile_operators.py", "--calls", "fused", "--targets", *targets)
    assert len({report["kernel"] for report in reports}) == 20
    for report in reports:
        assert report["spills"] == 0, report
        if report["kernel"] == "few_rows_kernel":
            # It is for Hopper alone, where it fills a processor: test_operators_ahead.py.
            continue
        # Of a multiprocessor of 64 K registers: 12 warps, or three programs of 8.
        assert report["registers"] <= (80 if "entropy" in report["kernel"] else 168), report
        assert report["shared"] <= 4096, report


LOOP = """
.L_x_1:
        /*0100*/                   MOV R{early}, R9 ;
        /*0110*/                   WARPGROUP.ARRIVE ;
        /*0120*/                   HGMMA.64x64x16.F32.BF16 R24, R12, gdesc[UR4], R24, gsb0 ;
        /*0130*/                   {wait} ;
        /*0140*/                   IMAD.WIDE.U32 R{late}, R8, 0x2, R6 ;
        /*0150*/              @P0  BRA `(.L_x_1) ;
        /*0160*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0170*/                   MOV R12, R3 ;
"""
WAIT, LATER = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"


@pytest.mark.parametrize(
    ("early", "late", "wait", "found"),
    [
        (2, 4, LATER, []),
        # In the same round, in the round after, and the second register of a pair.
        (2, 13, LATER, ["0140 IMAD.WIDE.U32 writes the left operand of HGMMA 0120"]),
        (15, 4, LATER, ["0100 MOV writes the left operand of HGMMA 0120"]),
        (2, 11, LATER, ["0140 IMAD.WIDE.U32 writes the left operand of HGMMA 0120"]),
        (2, 55, LATER, ["0140 IMAD.WIDE.U32 writes the sum of HGMMA 0120"]),
        (2, 56, LATER, []),
        # Nothing is in flight after a wait for all.
        (15, 13, WAIT, []),
    ],
)
def test_a_write_to_an_operand_in_flight_is_found(early, late, wait, found) -> None:
    assert overwritten_operands(LOOP.format(early=early, late=late, wait=wait)) == found


DESCRIPTOR = """
        /*0100*/                   {upper} ;
        /*0110*/                   SGXT.U32 R31, R21, 0xe ;
        /*0120*/                   IADD3 R70, P0, R31, 0x20, RZ ;
        /*0130*/                   IADD3.X R76, {zero}, -0x3ffffff0, RZ, P0, !PT ;
        /*0140*/                   R2UR UR10, R70 ;
        /*0150*/                   R2UR UR11, R76 ;
        /*0160*/                   HGMMA.64x16x16.F32.BF16 R80, gdesc[UR8].tnspB, R80, gsb0 ;
"""
ZERO = "CS2R R76, SRZ"


@pytest.mark.parametrize(
    ("upper", "zero", "found"),
    [
        (ZERO, "R76", []),
        (ZERO, "R77.reuse", []),
        ("NOP", "RZ", []),
        ("NOP", "R76", ["0130 IADD3.X R76, R76, -0x3ffffff0, RZ, P0, !PT"]),
        (ZERO, "R1", ["0130 IADD3.X R76, R1, -0x3ffffff0, RZ, P0, !PT"]),
        ("MOV R76, R9", "R76", ["0130 IADD3.X R76, R76, -0x3ffffff0, RZ, P0, !PT"]),
    ],
)
def test_an_operand_whose_address_is_lost_is_found(upper, zero, found) -> None:
    assert lost_addresses(DESCRIPTOR.format(upper=upper, zero=zero)) == found


LOOP_OF_COPIES = """
%b_x = ttg.local_alloc : () -> !ttg.memdesc<{slots}x64x64xbf16, #shared, #smem, mutable>
%b_k = ttg.local_alloc %k : (tensor<128x64xbf16, #blocked>) -> !ttg.memdesc<128x64xbf16, #shared>
scf.for %i = %c0 to %c2 step %c1 {{
  %tile = ttg.memdesc_index %b_x[%c0] : !ttg.memdesc<{slots}x64x64xbf16, #shared, #smem, mutable>
  %turned = ttg.memdesc_trans %tile : !ttg.memdesc<64x64xbf16, #shared, #smem, mutable>
  %sum = ttng.warp_group_dot %b_k, %turned, %acc {{inputPrecision = 0 : i32, isAsync = true}} :
}}
"""


@pytest.mark.parametrize(("slots", "found"), [(1, ["%b_x"]), (2, [])])
def test_a_tile_that_is_read_and_multiplied_needs_two_buffers(slots, found) -> None:
    assert single_buffers(LOOP_OF_COPIES.format(slots=slots)) == found
