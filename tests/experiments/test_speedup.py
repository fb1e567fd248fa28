import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from deltarule.ops.delta_rule import definition
from experiments import token_kernels, token_loop
from experiments.speedup import SpeedupCell
from tolerance import assert_close

CPU = torch.device("cpu")
# Without a GPU the kernels run in Triton's interpreter.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = SpeedupCell(name="small", head=16, width=32, tokens=64, lengths=(16, 64), repeats=2)


@pytest.mark.parametrize(
    ("module", "device"), [(token_loop, "cpu"), (token_kernels, DEVICE)], ids=["C", "Triton"]
)
def test_the_loop_over_tokens_is_the_definition(module, device):
    q, k = F.normalize(torch.randn(2, 2, 9, 3, 16, device=device), dim=-1).unbind()
    v, grad = torch.randn(2, 2, 9, 3, 24, device=device).unbind()
    beta = torch.rand(2, 9, 3, device=device)
    leaves = [x.double().requires_grad_() for x in (q, k, v, beta)]
    exact = definition.delta_rule(*leaves[:3], beta=leaves[3]).o
    gradients = torch.autograd.grad(exact, leaves, grad.double())
    o, error = module.forward(q, k, v, beta)
    assert_close(o, exact.detach(), name="o")
    found = module.backward(q, k, v, beta, error, grad)
    for name, x, y in zip(("q", "k", "v", "beta"), found, gradients, strict=True):
        assert_close(x, y, gradient=True, name=name)


def test_the_loop_in_c_takes_nothing_that_it_would_misread():
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="contiguous float32 on the CPU"):
        token_loop.forward(x.transpose(1, 2), x, x, x[..., 0])
    with pytest.raises(ValueError, match="float64"):
        token_loop.forward(x.double(), x, x, x[..., 0].contiguous())


def test_loading_the_loop_in_c_leaves_the_smallest_numbers_alone():
    program = """
import torch
from experiments import token_loop
token_loop.library()
assert (torch.tensor([1e-39]) * 1).item() > 0
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_a_compiler_it_says_so(monkeypatch):
    token_loop.library.cache_clear()
    monkeypatch.setattr(token_loop.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="install a C compiler"):
        token_loop.library()


def test_both_forms_are_checked_against_each_other_and_timed(tmp_path):
    threads = torch.get_num_threads()
    figures = SMALL.run(tmp_path / "cell", CPU)
    assert figures["lengths"].keys() == {"16", "64"}
    for row in figures["lengths"].values():
        assert 0 < row["difference"] < 1e-5
        assert all(
            row[f"{form}_{kind}"] > 0 for form in ("chunks", "loop") for kind in ("forward", "both")
        )
    assert torch.get_num_threads() == threads


def test_a_wrong_baseline_is_no_result(monkeypatch, tmp_path):
    def wrong(q, k, v, beta):
        return 1.1 * v, v

    monkeypatch.setattr(token_loop, "forward", wrong)
    with pytest.raises(ValueError, match="must compute the same"):
        SMALL.run(tmp_path / "cell", CPU)


@pytest.mark.parametrize("change", [{"head": 24}, {"lengths": (48,)}])
def test_sizes_that_do_not_divide_are_refused(change):
    with pytest.raises(ValueError, match="must divide"):
        SpeedupCell(**(vars(SMALL) | change))
