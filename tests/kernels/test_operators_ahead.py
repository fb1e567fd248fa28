"""What the compiler makes of the kernels of the operators beside the delta rule."""

import re

import pytest

from kernels.test_compile_ahead import compiled
from promised import promised

promised("triton")

# Bytes of a thread that go to memory: the gradients of a memory go from product to product, and
# each has operands that fill half of the registers; a scan with every gate at once has no source;
# sLSTM with heads of 256 channels holds four gates and four numbers of 16 x 256 each.
SPILLS = {
    "network_scan_kernel": 512, "network_read_backward_kernel": 512, "network_backward_kernel": 640,
    "memory_backward_kernel": 512, "memory_scan_kernel": 288, "read_kernel": 16,
    "slstm_forward_kernel": 160, "slstm_backward_kernel": 512, "split_forward_kernel": 16,
}  # fmt: skip
SPILLS_OF_ALL_GATES = 256
# A row of 128 channels, split for products in tf32, fills half of the registers by itself.
SPILLS_OF_WIDE_NETWORKS = 2048
# Kernels that run only on some of the architectures, by what their calls' names hold: those of
# `ttt` and `titans`, sLSTM where heads are split, products of a few rows.
ONLY = {"TTT": (90, 100), "Titans": (90, 100), "split": (80, 90, 100), "few rows": (90,)}
# What a block has there; the small architectures have 99 KiB.
SHARED = {"split": 144 * 1024, "few rows": 144 * 1024}


def assert_sound(found: list[dict], least: int) -> None:
    assert len(found) >= least
    for report in found:
        kind = next((kind for kind in ONLY if kind in report["call"]), "")
        if report["target"] not in ONLY.get(kind, (report["target"],)):
            continue
        spills = SPILLS_OF_ALL_GATES if "all" in report["call"] else SPILLS.get(report["kernel"], 0)
        if re.search("K 128, .* inside", report["call"]):
            spills = SPILLS_OF_WIDE_NETWORKS
        assert report["spills"] <= spills, report
        assert report["shared"] <= SHARED.get(kind, 64 * 1024), report
        assert report["serialised"] == 0, report
        assert report["overwritten"] == [], report


@pytest.mark.parametrize(
    "call",
    [
        "scan, Mamba, V 1536, K 16, torch.bfloat16",
        "mesa, C 64, K 128",
        "sLSTM, D 64, torch.float32",
        "sLSTM split, D 256, torch.bfloat16",
        "TTT, K 64, 256 inside, packed",
        "few rows",
    ],
)
def test_compiled_for_hopper(call) -> None:
    assert_sound(compiled("compile_operators.py", "--targets", "90", "--calls", call), 1)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["80", "86", "89", "90", "100", "120"])
def test_compiled_for_every_gpu(target) -> None:
    assert_sound(compiled("compile_operators.py", "--targets", target), 40)
