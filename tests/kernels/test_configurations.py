"""The tables: every call has a row, the nearest below serves, tiles follow the values."""

import ast
import itertools
from pathlib import Path

import pytest

from promised import promised

promised("triton")

import deltarule
from deltarule.ops.delta_rule.triton import tile_sizes
from deltarule.ops.delta_rule.triton.tile_sizes import TileKey, chunk_rows, configuration
from deltarule.ops.delta_rule.triton.tile_tables import REGISTERS, TABLES
from deltarule.ops.runtime import machine

KERNELS = ("pair_scores", "next_state", "next_state_backward", "gradients")
DECAYED = ("exact_scores", "fast_scores", "free_scores", "next_state", "next_state_backward",
          "pair_gradients", "fast_gradients", "free_gradients", "exact_gradients")  # fmt: skip


@pytest.mark.parametrize("architecture", [*TABLES, 87, 103, 110, 121])
def test_every_call_has_a_configuration(architecture) -> None:
    sizes = itertools.product((2, 4), (1, 5, 64, 100, 128, 256), (1, 64, 100, 512))
    for element, key, value in sizes:
        for erase, decayed in (("tied", False), ("tied", True), ("free", True), ("none", False)):
            call = TileKey(architecture, element, key, value, erase, decayed)
            for kernel in DECAYED if decayed else KERNELS:
                config = configuration(kernel, call)
                # Sixteen go without tensor memory.
                most = 16 if kernel == "exact_gradients" and 100 <= architecture < 120 else 8
                assert config["num_warps"] in (1, 2, 4, 8, most)
                assert 32 * config["num_warps"] * config.get("maxnreg", 0) <= REGISTERS
                assert config.get("BV", 16) <= max(16, 2 * value)
            assert chunk_rows(call) in (16, 32, 64)


@pytest.mark.parametrize(("values", "rows"), [(128, 128), (192, 64), (200, 128), (256, 128)])
def test_a_scan_on_hopper_leaves_no_half_of_a_tile_empty(values, rows) -> None:
    call = TileKey(90, 2, 96, values, "tied", False)
    assert configuration("next_state", call)["BV"] == rows
    assert configuration("next_state_backward", call)["BV"] == 128
    assert configuration("next_state", call._replace(erase="none"))["BV"] == 128


def test_the_nearest_architecture_below() -> None:
    assert tile_sizes.table_of(103) is TABLES[100]
    assert tile_sizes.table_of(87) is TABLES[86]
    assert tile_sizes.table_of(75) is TABLES[80]


def test_the_cache_folder_follows_no_environment_variable(monkeypatch) -> None:
    before = machine.cache_folder()
    for name in ("HOME", "XDG_CACHE_HOME", "USERPROFILE"):
        monkeypatch.setenv(name, "/elsewhere")
    assert machine.cache_folder() == before


def test_no_kernel_or_operator_reads_the_environment() -> None:
    root = Path(deltarule.__file__).parent
    for folder in ("kernels", "ops", "reference", "rules", "nn", "models"):
        for file in (root / folder).rglob("*.py"):
            names = {
                node.attr if isinstance(node, ast.Attribute) else node.id
                for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, ast.Attribute | ast.Name)
            }
            assert not names & {"environ", "getenv", "putenv"}, file


@pytest.mark.parametrize("erase", ["none", "tied"])
def test_float32_has_tiles_of_its_own_on_hopper(erase) -> None:
    call = TileKey(90, 4, 64, 64, erase, False)
    assert configuration("next_state", call)["BV"] == 64
    assert configuration("next_state", call._replace(key_size=256))["BV"] == 16
    # Without registers to spare, or timings, as they were.
    assert configuration("next_state", call._replace(architecture=100))["BV"] == 16
    assert configuration("next_state", call._replace(decayed=True))["BV"] == 16
