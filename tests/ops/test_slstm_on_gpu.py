"""`slstm` on a CUDA device, against its form in PyTorch in float64."""

import pytest
import torch

from deltarule import pack, slstm
from ops.test_slstm import assert_equal_parts, gradients, make
from tolerance import relative_rms

pytestmark = pytest.mark.gpu
LENGTHS = [1, 0, 130, 2, 40, 0, 77]


def on_gpu(given):
    return {name: x.cuda() for name, x in given.items()}


@pytest.mark.parametrize("form", ["rows", "packed", "padded"])
@pytest.mark.parametrize("size", [5, 64, 100, 256])
def test_forward_and_backward(form, size):
    packed = form == "packed"
    sizes = (1, sum(LENGTHS)) if packed else (18, 130)
    given = make(*sizes, size=size, dtype=torch.float32, sequences=7 if packed else None)
    given = on_gpu(given | {"gates": given["gates"] / 4, "recurrent": given["recurrent"] / size})
    options = {"cu_seqlens": pack(LENGTHS).cuda()} if packed else {}
    if form == "padded":
        options = {"lengths": (torch.arange(18) * 8 % 131).cuda()}
    exact = gradients({name: x.double() for name, x in given.items()}, **options)
    found = gradients(given, impl="triton", **options)
    if form == "padded":
        there = torch.arange(130, device="cuda") < options["lengths"][:, None]
        found[0], exact[0] = found[0][there], exact[0][there]
    assert_equal_parts(found, exact)


def test_bfloat16_repeats_its_bits():
    given = on_gpu(make(3, 200, size=64, dtype=torch.float32))
    given = {name: x.bfloat16() if name == "gates" else x for name, x in given.items()}
    first, second = gradients(given), gradients(given)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    exact = slstm(**{name: x.double() for name, x in given.items()})
    assert first[0].dtype == torch.bfloat16
    assert relative_rms(first[0], exact.o) < 4e-3
    alone = slstm(
        given["gates"][1:2], given["recurrent"], initial_state=given["initial_state"][1:2]
    )
    assert torch.equal(alone.o, first[0][1:2])
