"""What the compiler makes of the fused kernels for sm_90: their products overlap, tiles fit."""

import pytest

from kernels.test_compile_ahead import compiled
from promised import promised

promised("triton")

PROGRAM, CHANNELS = "compile_gluon.py", "compile_gluon_channels.py"
# Bytes of shared memory that one block may have.
SHARED = 227 * 1024
# Bytes a thread that may spill: of whole chunks, and where the last chunk goes row by row, in code
# that runs once a sequence. Triton 3.6.0 and 3.7.1 spill 224 and 600 at most.
SPILLS = {"whole": 224, "ragged": 608}
# With a decay per channel and Triton 3.7.1, whole chunks, 280 at most.
SPILLS_CHANNELS = {"whole": 288, "ragged": 608}


def check(report: dict, spills: dict[str, int] = SPILLS) -> None:
    ragged = any(word in report["call"] for word in ("ragged", "packed"))
    assert report["serialised"] == 0, report
    assert report["overwritten"] == [], report
    assert report["shared"] <= SHARED, report
    assert report["spills"] <= spills["ragged" if ragged else "whole"], report


def test_the_gated_forward_keeps_its_products_in_flight() -> None:
    (report,) = compiled(PROGRAM, "gated 128 bare alone whole forward")
    check(report)


def test_the_assembler_takes_every_form_of_the_gradients() -> None:
    reports = compiled(PROGRAM, "gradients")
    assert len(reports) == 32
    for report in reports:
        check(report)


@pytest.mark.slow
def test_every_form_keeps_its_products_in_flight() -> None:
    reports = compiled(PROGRAM)
    assert len(reports) == 128
    for report in reports:
        check(report)


def test_every_form_of_decays_per_channel_keeps_its_products_in_flight() -> None:
    reports = compiled(CHANNELS)
    assert len(reports) == 12
    for report in reports:
        check(report, SPILLS_CHANNELS)
