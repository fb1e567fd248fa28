"""The Triton kernels of `mesa`, `ttt` and `titans` on a CUDA device, against float64."""

import pytest
import torch
import torch.nn.functional as F

from deltarule import MesaState, mesa, pack
from deltarule.ops import dispatch
from deltarule.ops.memory import inputs
from ops import memories
from ops import test_mesa as recursive
from tolerance import assert_close, relative_rms

pytestmark = pytest.mark.gpu
LENGTHS = (3, 0, 150, 1, 70)


def assert_near(found, own, exact, bar):
    """As near to float64 as PyTorch in float32 is, or within the bar: products are in tf32."""
    for name, x in found.items():
        error = relative_rms(x, exact[name], floor=1e-9)
        assert error <= max(4 * relative_rms(own[name], exact[name], floor=1e-9), bar), name


def mesa_gradients(x, impl, **options):
    leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
    state = MesaState(leaves["covariance"], leaves["values"])
    given = {name: leaves[name] for name in ("beta", "regularizer", "log_decay")}
    out = mesa(
        leaves["q"], leaves["k"], leaves["v"], **given, initial_state=state, impl=impl, **options
    )
    loss = out.o.square().sum() + sum(part.square().sum() for part in out.final_state)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"o": out.o, "values": out.final_state.values}, dict(zip(x, gradients, strict=True))


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("key_size", [6, 64, 128])
def test_mesa(key_size, lengths):
    x = recursive.make(1 if lengths else 2, 224, lengths and len(lengths), key_size)
    x["covariance"] = x["covariance"] / key_size
    x = {name: y.float().cuda() for name, y in x.items()}
    options = {"iterations": 40, "cu_seqlens": None if lengths is None else pack(lengths)}
    found = mesa_gradients(x, "triton", **options)
    own = mesa_gradients(x, "torch", **options)
    exact = mesa_gradients({name: y.double() for name, y in x.items()}, "torch", **options)
    assert_near(found[0], own[0], exact[0], 2e-6)
    assert_near(found[1], own[1], exact[1], 1e-5)


def test_mesa_is_chosen_in_16_bits_and_repeatable():
    x = {name: y.float().cuda() for name, y in recursive.make(key_size=64).items()}
    narrow = x | {name: x[name].bfloat16() for name in "qkv"}
    out, again = recursive.run(narrow), recursive.run(narrow, "triton")
    assert torch.equal(out.o, again.o)
    exact = recursive.run({name: y.double() for name, y in narrow.items()}, "torch")
    assert relative_rms(out.o, exact.o) < 2**-7


def on_gpu(operator, lengths, dtype=torch.float32, maps=1, **options):
    options = {"tokens": 150, "size": 16, "lengths": lengths} | options
    case = memories.make(operator, maps, **options)
    rounded = {
        name: x.cuda() if name == "position"
        else x.to("cuda", dtype if name in "qkv" else torch.float32)
        for name, x in case.tensors.items()
    }  # fmt: skip
    exact = {name: x if name == "position" else x.double() for name, x in rounded.items()}
    return case.changed(**rounded), case.changed(**exact)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize(("channels", "size"), [(4, 5), (64, 16), (48, 1)])
@pytest.mark.parametrize("operator", ["ttt", "titans"])
def test_memories(operator, channels, size, lengths, monkeypatch):
    monkeypatch.setattr(memories, "K", channels)
    assert_as_near_as_pytorch(operator, lengths, size=size)


def assert_as_near_as_pytorch(operator, lengths, **options):
    case, exact = on_gpu(operator, lengths, **options)
    found, own, wanted = case.run("triton"), case.run("torch"), exact.run("torch")
    named = [dict(enumerate(memories.tensors_of(out))) for out in (found, own, wanted)]
    assert_near(*named, 2e-6)
    assert torch.equal(found.final_state.position, wanted.final_state.position)
    gradients = case.gradients("triton"), case.gradients("torch"), exact.gradients("torch")
    assert_near(*gradients, 1e-5)


@pytest.mark.parametrize("channels", [72, 128])
@pytest.mark.parametrize("operator", ["ttt", "titans"])
def test_a_wide_memory(operator, channels, monkeypatch):
    monkeypatch.setattr(memories, "K", channels)
    assert_as_near_as_pytorch(operator, LENGTHS)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize(("channels", "inner", "size"), [(4, 7, 5), (64, 256, 16), (128, 130, 1)])
@pytest.mark.parametrize("operator", ["ttt", "titans"])
def test_memories_of_two_maps(operator, channels, inner, size, lengths, monkeypatch):
    monkeypatch.setattr(memories, "K", channels)
    monkeypatch.setattr(memories, "INNER", inner)
    assert_as_near_as_pytorch(operator, lengths, size=size, maps=2)


@pytest.mark.parametrize("operator", ["ttt", "titans"])
def test_a_memory_of_two_maps_is_repeatable(operator):
    case, exact = on_gpu(operator, None, torch.bfloat16, maps=2)
    out = case.run("triton")
    assert torch.equal(out.o, case.run("triton").o)
    assert relative_rms(out.o, exact.run("torch").o) < 2**-7
    first, second = case.gradients("triton"), case.gradients("triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("operator", ["ttt", "titans"])
def test_memories_are_chosen_in_16_bits_and_repeatable(operator):
    case, exact = on_gpu(operator, None, torch.bfloat16)
    out = case.run()
    assert torch.equal(out.o, case.run("triton").o)
    assert relative_rms(out.o, exact.run("torch").o) < 2**-7
    first, second = case.gradients("auto"), case.gradients("auto")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("operator", ["ttt", "titans"])
def test_what_the_kernels_do_not_take_is_named(operator):
    case, _ = on_gpu(operator, None, size=17)
    with pytest.raises(ValueError, match="mini-batches up to 16, got K = 4, V = 4 and 17"):
        case.run("triton")


@pytest.mark.skipif(inputs.STREAMED_IS_CHOSEN, reason="a GPU has timed them")
@pytest.mark.parametrize("operator", ["ttt", "titans"])
def test_kernels_that_no_gpu_has_timed_are_not_chosen(operator, monkeypatch):
    monkeypatch.setattr(dispatch, "_warned", set())
    case, _ = on_gpu(operator, None, maps=2)
    with pytest.warns(UserWarning, match='not been timed on a GPU; impl="triton" takes them'):
        out = case.run()
    assert torch.equal(out.o, case.run("torch").o)


def test_a_kernel_inside_a_compiled_function():
    x = {name: y.float().cuda() for name, y in recursive.make(1, 70, key_size=16).items()}

    def loss(k):
        return recursive.run(x | {"k": k}, "triton").o.square().sum()

    k = F.normalize(torch.randn_like(x["k"]), dim=-1).requires_grad_()
    (expected,) = torch.autograd.grad(loss(k), k)
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    (found,) = torch.autograd.grad(compiled(k), k)
    assert_close(found, expected.double(), dtype=torch.float32, gradient=True)
