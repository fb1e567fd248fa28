"""The fused operators beside the recurrence, in the interpreter and on a GPU, against float64."""

from itertools import pairwise

import pytest
import torch

from neighbours import (
    MAKERS,
    PACKED,
    Neighbour,
    conv,
    embedding,
    entropy,
    gated_norm,
    residual_norm,
    swiglu,
    with_gradients,
)
from opchecked import opcheck_all
from promised import promised
from tolerance import assert_close, relative_rms

promised("triton")

from deltarule.models import loss
from deltarule.nn import mlp, norm
from deltarule.ops.delta_rule import gate_logits
from deltarule.ops.fused import embedding_triton
from deltarule.ops.fused import gates as gate_ops
from deltarule.ops.fused import norms as sum_ops
from deltarule.ops.fused import short_conv as conv_ops
from deltarule.ops.fused.cross_entropy import CrossEntropy
from deltarule.ops.fused_kernels import kernel_runs, why_not_fused

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Wide enough for the tiles of a real layer.
LARGE = {
    "conv": lambda: conv(tokens=1000, channels=384),
    "conv, packed": lambda: conv(channels=256, lengths=(513, 0, 1, 2, 400)),
    "conv, sliced": lambda: conv(tokens=300, channels=384, sliced=True),
    "norm": lambda: gated_norm(512),
    "residual norm": lambda: residual_norm(2048),
    "residual norm, wide": lambda: residual_norm(5000),
    "embedding": lambda: embedding(257, 512, 5000),
    "embedding of few tokens": lambda: embedding(10, 128, 5000),
    "embedding of many tokens": lambda: embedding(20000, 256, 5000),
    "swiglu": lambda: swiglu(5632),
    "cross entropy": lambda: entropy(50257),
    "linear cross entropy": lambda: entropy(32000, linear=True),
}


@pytest.fixture(autouse=True)
def interpreted(request) -> None:
    """Without a GPU, unless the test asks for one."""
    if torch.cuda.is_available() and request.node.get_closest_marker("gpu") is None:
        pytest.skip("kernels are compiled here")


def each(*names: str):
    """Tests of these cases, or of all: on a GPU of all, and of large ones if none is named."""
    few = [pytest.param("cpu", MAKERS[name], id=name) for name in names or MAKERS]
    on_gpu = MAKERS | ({} if names else {f"large {name}": of for name, of in LARGE.items()})
    many = [
        pytest.param("cuda", of, id=f"{name}, cuda", marks=pytest.mark.gpu)
        for name, of in on_gpu.items()
    ]
    return pytest.mark.parametrize(("device", "make"), [*few, *many])


def both(case: Neighbour, device: str) -> tuple[tuple, tuple]:
    """Outputs and gradients of the fused form, and of the plain one in float64."""
    exact = case.to(torch.float64)
    weights = [torch.randn_like(x) for x in exact.plain(exact.tensors)]
    there = {name: x.to(device) for name, x in case.tensors.items()}
    return (
        with_gradients(case.fused, there, weights),
        with_gradients(case.plain, exact.tensors, weights),
    )


@each()
def test_float32(device, make) -> None:
    (outputs, gradients), (expected, exact) = both(make(), device)
    for x, y in zip(outputs, expected, strict=True):
        assert x.device.type == device
        assert_close(x, y, dtype=torch.float32)
    for leaf, gradient in gradients.items():
        assert_close(gradient, exact[leaf], dtype=torch.float32, gradient=True, name=leaf)


@each()
def test_16_bits_are_rounded_once(device, make) -> None:
    # The interpreter cuts bfloat16 where a GPU rounds.
    for dtype in (torch.float16,) if device == "cpu" else (torch.float16, torch.bfloat16):
        case, unit = make().to(dtype), torch.finfo(dtype).eps
        (outputs, gradients), (expected, exact) = both(case, device)
        for x, y in zip(outputs, expected, strict=True):
            # The linear form rounds its logits, as F.linear does.
            assert relative_rms(x, y) < unit
        for leaf, gradient in gradients.items():
            assert gradient.dtype == case.tensors[leaf].dtype
            assert relative_rms(gradient, exact[leaf]) < 2 * unit, leaf


@pytest.mark.parametrize("padding", [{}, {"lengths": PACKED}])
@pytest.mark.parametrize("device", PLACES)
def test_a_convolution_step_by_step_equals_the_whole_bitwise(device, padding) -> None:
    case = conv(channels=12 if device == "cpu" else 300, **padding)
    x, weight, history = (t.to(device) for t in case.tensors.values())
    whole, final = case.fused({"x": x, "weight": weight, "history": history})
    bounds = [0, *torch.tensor(padding.get("lengths", [x.shape[1]])).cumsum(0).tolist()]
    for n, (start, stop) in enumerate(pairwise(bounds)):
        rows = slice(n, n + 1) if padding else slice(None)
        before, steps = history[rows], []
        for t in range(start, stop):
            y, before = conv_ops.short_conv(x[:, t : t + 1], weight, before, None, None, None, True)
            steps.append(y)
        assert torch.equal(before, final[rows])
        assert torch.equal(torch.cat([whole[:, :0], *steps], 1), whole[:, start:stop])


def test_tokens_are_summed_in_a_tree_of_tiles(monkeypatch) -> None:
    monkeypatch.setitem(embedding_triton.RUNS, "BR", 16)
    tokens, d_x, weight = torch.randint(90, (300,)), torch.randn(300, 4), torch.empty(100, 4)
    # One fills tiles of the second level, too.
    tokens[20:] = 7
    expected = torch.zeros(100, 4).double().index_add(0, tokens, d_x.double())
    d_weight = embedding_triton.sums_by_token(d_x, tokens, weight)
    assert_close(d_weight, expected, dtype=torch.float32)
    d_x[0] = torch.nan
    again = embedding_triton.sums_by_token(d_x, tokens, weight)
    others = torch.arange(100) != tokens[0]
    assert torch.equal(again[others], d_weight[others])
    assert again[~others].isnan().all()
    nothing = embedding_triton.sums_by_token(d_x[:0], tokens[:0], weight)
    assert torch.equal(nothing, torch.zeros(100, 4))


def test_rows_of_a_convolution_are_those_of_it_alone_bitwise() -> None:
    case = conv(tokens=70, channels=200)
    x, weight, history = case.tensors.values()
    y, _ = case.fused(case.tensors)
    alone, _ = case.fused({"x": x[1:], "weight": weight, "history": history[1:]})
    assert torch.equal(y[1:], alone)


def test_wrong_offsets_on_a_gpu_lead_nowhere() -> None:
    x, weight, history = conv(lengths=(9, 4)).tensors.values()
    wrong = torch.tensor([0, -(10**6), 10**6])
    owner = torch.tensor([0] * 6 + [7] * 7)
    y, final = conv_ops.short_conv(x, weight, history, wrong, owner, None, True)
    assert y.shape == x.shape
    given = y, final, x, weight, history, wrong, owner, None, True
    conv_ops.short_conv.backward_operator(*given, [True] * 3)


CHECKED = (
    "conv, packed", "norm", "norm without gate", "residual norm", "residual norm, no sum", "swiglu",
    "head decay", "head decay and step", "write strength", "cross entropy", "linear cross entropy",
)  # fmt: skip


@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(name) -> None:
    case = MAKERS[name]()
    weights = [torch.randn_like(x) for x in case.plain(case.tensors)]
    names = opcheck_all(lambda: with_gradients(case.fused, case.tensors, weights))
    # One each, and the definition of no other.
    assert len(names) == 2


@each("conv, packed", "norm", "residual norm", "swiglu", "head decay and step", "cross entropy")
def test_compiles_without_a_break(device, make) -> None:
    if make in (MAKERS["embedding"], MAKERS["embedding of many"]):
        pytest.skip("a compiled model calls PyTorch's")
    torch._dynamo.reset()
    case = make()
    tensors = {name: x.to(device) for name, x in case.tensors.items()}
    weights = [torch.randn_like(x) for x in case.fused(tensors)]
    compiled = torch.compile(case.fused, fullgraph=True, backend="aot_eager")
    outputs, gradients = with_gradients(compiled, tensors, weights)
    expected, exact = with_gradients(case.fused, tensors, weights)
    assert all(map(torch.equal, outputs, expected))
    assert all(torch.equal(gradients[leaf], exact[leaf]) for leaf in exact)


@pytest.mark.parametrize(
    "name",
    ["conv", "norm", "residual norm, no sum", "swiglu", "head decay", "write strength",
     "cross entropy", "linear cross entropy"],
)  # fmt: skip
def test_a_second_derivative_is_refused(name) -> None:
    case = MAKERS[name]()
    leaves = {key: x.requires_grad_() for key, x in case.tensors.items()}
    (first,) = torch.autograd.grad(
        case.fused(leaves)[0].sum(), next(iter(leaves.values())), create_graph=True
    )
    with pytest.raises(NotImplementedError, match="first reverse-mode derivative only"):
        first.sum().backward()


@pytest.mark.parametrize("logit", [-1e4, -80.0, 80.0, 1e4, -float("inf")])
def test_extreme_gate_logits(logit) -> None:
    logits = torch.full((1, 2, 3), logit, requires_grad=True)
    log_decay, dt = gate_ops.log_decay(logits, torch.ones(3), torch.zeros(3), True)
    wide = logits.detach().double()
    exact = gate_logits.step_and_log_decay(wide, torch.ones(3), torch.zeros(3))
    for x, y in zip((dt, log_decay), exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-6, atol=1e-37)
    log_decay.sum().backward()
    assert logits.grad.isfinite().all()


def test_a_wrong_target_gives_nan_instead_of_a_wrong_read() -> None:
    call = CrossEntropy(torch.randn(2, 5), torch.tensor([1, 10**6]), -100)
    assert loss._run_triton(call).isnan()


def test_a_cpu_keeps_the_plain_form() -> None:
    x = torch.zeros(1, 2, 3)
    reasons = (
        norm.why_no_gated_norm(x, x, "silu"), norm.why_no_residual_norm(x, x),
        mlp.why_not_gated(x, x),
        why_not_fused(x),
    )  # fmt: skip
    assert all("Triton needs CUDA tensors" in reason for reason in reasons)
    assert not any(kernel_runs(x, reason) for reason in reasons)
    assert kernel_runs(x, None)


def test_a_branch_in_16_bits_is_added_to_a_stream_in_32() -> None:
    x, y, weight = torch.randn(2, 5, 12), torch.randn(2, 5, 12).half(), torch.randn(12)
    leaves = [t.requires_grad_() for t in (x, y, weight)]
    outputs = sum_ops.residual_norm(x, y, weight, 1e-5)
    expected = norm.plain_residual_norm(x, y, weight, 1e-5)
    for a, b in zip(outputs, expected, strict=True):
        assert a.dtype == torch.float32
        assert_close(a, b.double(), dtype=torch.float32)
    weights = [torch.randn(2, 5, 12) for _ in range(2)]
    found = torch.autograd.grad(outputs, leaves, weights)
    exact = torch.autograd.grad(expected, leaves, weights)
    assert [g.dtype for g in found] == [torch.float32, torch.float16, torch.float32]
    assert_close(found[0], exact[0].double(), dtype=torch.float32, gradient=True)
    assert relative_rms(found[1], exact[1]) < 2**-10


def test_the_branch_alone_is_read_where_nobody_reads_the_norm() -> None:
    x, y = torch.randn(2, 1, 5, 12, requires_grad=True).unbind()
    total, _ = sum_ops.residual_norm(x, y, torch.ones(12), 1e-5)
    weight = torch.randn_like(total)
    assert all(torch.equal(g, weight) for g in torch.autograd.grad(total, (x, y), weight))
