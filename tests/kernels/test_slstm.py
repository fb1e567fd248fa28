"""The Triton kernels of `slstm` under the interpreter, against float64."""

import pytest
import torch

from deltarule import pack
from deltarule.ops.dispatch import Implementation, always
from deltarule.ops.slstm import api
from ops.test_slstm import LENGTHS, assert_equal_parts, gradients, make
from promised import promised

promised("triton")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here: see test_slstm_on_gpu"
)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    runs = Implementation(always, api.run_triton)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "triton", runs)


@pytest.mark.parametrize("form", ["rows", "packed", "padded"])
@pytest.mark.parametrize("size", [5, 40])
def test_forward_and_backward(form, size):
    packed = form == "packed"
    sizes = (1, sum(LENGTHS)) if packed else (18, 6)
    given = make(*sizes, size=size, dtype=torch.float32, sequences=6 if packed else None)
    given["gates"] = given["gates"] / 4
    options = {"cu_seqlens": pack(LENGTHS)} if packed else {}
    if form == "padded":
        options = {"lengths": torch.arange(18) % 7}
    exact = gradients({name: x.double() for name, x in given.items()}, impl="torch", **options)
    found = gradients(given, impl="triton", **options)
    if form == "padded":
        there = torch.arange(6) < options["lengths"][:, None]
        found[0], exact[0] = found[0][there], exact[0][there]
    assert_equal_parts(found, exact)
