"""What the compiler makes of the fused forward with a decay per channel for sm_90."""

import pytest

from kernels.test_compile_ahead import compiled
from kernels.test_gluon_ahead import SHARED
from promised import promised

promised("triton")

PROGRAM = "compile_gluon_channels.py"
# Bytes a thread that may spill, as in test_gluon_ahead.py: Triton 3.6.0 and 3.7.1 spill so many.
SPILLS = {"whole": 304, "ragged": 744}


def check(report: dict) -> None:
    assert report["serialised"] == 0, report
    assert report["overwritten"] == [], report
    assert report["shared"] <= SHARED, report
    assert report["spills"] <= SPILLS["whole" if "whole" in report["call"] else "ragged"], report


def test_it_keeps_its_products_in_flight() -> None:
    reports = compiled(PROGRAM, "kda bare whole", "gla unit packed")
    assert len(reports) == 2
    for report in reports:
        check(report)


@pytest.mark.slow
def test_every_form_keeps_its_products_in_flight() -> None:
    reports = compiled(PROGRAM)
    assert len(reports) == 12
    for report in reports:
        check(report)
