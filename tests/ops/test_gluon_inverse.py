"""The inverse of a chunk's triangle in Gluon: of whole numbers it rounds nothing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from promised import promised

promised("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltarule.ops.delta_rule.gluon.forward import new_tiles
from deltarule.ops.delta_rule.gluon.inverse import (
    BATCH,
    invert,
    invert_blocks,
    invert_transposed,
    transposed_blocks,
)
from deltarule.ops.delta_rule.gluon.memory import BLOCK, BLOCKS, CHUNK, GATE, Form, product
from deltarule.ops.runtime.gluon_tiles import barrier
from deltarule.ops.runtime.launch import Launch
from gluon_interpreter import run


@gluon.jit
def inverse_role(tiles, m, beta, out, SAVE: gl.constexpr, PAIRS: gl.constexpr):
    """U of L = B M, or N of M [64, 64]: blocks on the diagonal in registers, the rest in `rows`."""
    LAYOUT: gl.constexpr = product(CHUNK)
    GATES_LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_t = gl.arange(0, CHUNK, GATES_LAYOUT)
    b_beta = gl.load(beta + o_t)
    tiles.gates.index(GATE.BETA).store(b_beta)
    tiles.gates.index(GATE.FACTOR).store(b_beta * 0.0 - 1.0 if SAVE else b_beta * -1.0)
    o_i = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))[:, None]
    o_j = gl.arange(0, CHUNK, gl.SliceLayout(0, LAYOUT))[None, :]
    rest = gl.load(m + (o_i * CHUNK + o_j), mask=o_j // BLOCK < o_i // BLOCK, other=0.0)
    tiles.rows.store(rest.to(gl.float16))
    block = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, BATCH)))[:, None, None]
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, BATCH)))[None, :, None]
    row = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, BATCH)))[None, None, :]
    row, column = block * BLOCK + row, block * BLOCK + column
    minus_m = gl.load(m + (row * CHUNK + column)) * -1.0
    minus_l = minus_m * gl.load(beta + (column if SAVE else row))
    barrier()
    blocks = invert_transposed(minus_l)
    if PAIRS:
        blocks = invert_blocks(transposed_blocks(minus_l), minus_l)
    found = invert(tiles, 0, 0, blocks, minus_m, SAVE)
    gl.store(out + (o_i * CHUNK + o_j), found)


@gluon.jit
def inverse_kernel(m, beta, out, FORM: gl.constexpr, PAIRS: gl.constexpr):
    """One role alone."""
    inverse_role(new_tiles(gl.bfloat16, FORM), m, beta, out, FORM.SAVE, PAIRS)


def check(launch: Callable[..., object], save: bool, device: str = "cpu") -> None:
    """Numbers of few digits: sparse M of -1, 0 and 1, and beta of 0, 1 and 2."""
    form = Form(
        TIED=True, DECAY=False, UNIT=False, ENDS="whole", K=CHUNK.value, PARTS=0, SAVE=save
    )  # fmt: skip
    m = (torch.randint(-1, 2, (64, 64)) * (torch.rand(64, 64) < 0.15)).tril(-1).float()
    beta = torch.randint(0, 3, (64,)).float()
    out = torch.full((64, 64), torch.nan, device=device)
    launch(form, m.to(device), beta.to(device), out)
    one, m, beta = torch.eye(64).double(), m.double(), beta.double()
    if save:
        expected = -torch.linalg.inv(one + m * beta) @ m
    else:
        expected = torch.linalg.inv(one + beta[:, None] * m) - one
    expected = expected.round()
    assert 8 < expected.abs().max() < 2048
    assert torch.equal(out.double().cpu(), expected)


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
def test_the_inverse_of_whole_numbers_is_exact(pairs, save) -> None:
    def interpreted(form: Form, m: Tensor, beta: Tensor, out: Tensor) -> None:
        given = {"m": m, "beta": beta, "out": out, "FORM": form, "PAIRS": pairs}
        run(inverse_kernel, 1, given, 0)

    check(interpreted, save)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
def test_so_it_is_on_a_gpu(pairs, save) -> None:
    def launched(form: Form, *given: Tensor) -> None:
        Launch(inverse_kernel, {"FORM": form, "PAIRS": pairs, "num_warps": 4})((1, 1, 1), *given)

    check(launched, save, "cuda")
