"""Norms, networks and convolved projections, each one node of autograd, beside plain float64."""

import pytest
import torch
import torch.nn.functional as F

from deltarule.models import CausalLM, ModelConfig
from deltarule.nn import (
    LinearAttention,
    RMSNorm,
    ShortConv,
    convolved_products,
    delta_mixer,
    embedding,
    linears,
    mlp,
    short_conv,
)
from deltarule.nn import norm as norms
from deltarule.nn.layout import make_layout
from deltarule.nn.norm import GatedRMSNorm
from deltarule.ops.fused.swiglu import swiglu
from deltarule.ops.operators import direct
from kernels.interpreted import interpreted
from nodes import kept, nodes_of
from promised import promised
from tolerance import assert_close, relative_rms

promised("triton")
pytestmark = interpreted


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Kernels under Triton's interpreter."""
    monkeypatch.setattr(short_conv, "why_not_fused", lambda x: None)
    monkeypatch.setattr(norms, "why_no_gated_norm", lambda *_: None)


def wide(given):
    return [x.detach().double().requires_grad_() for x in given]


def assert_as(expected, exact_leaves, outputs, leaves):
    """Outputs and gradients of float32 are those of float64."""
    for a, b in zip(outputs, expected, strict=True):
        assert_close(a, b, dtype=torch.float32)
    given = [torch.randn(x.shape) for x in outputs]
    found = torch.autograd.grad(outputs, leaves, given)
    exact = torch.autograd.grad(expected, exact_leaves, [d.double() for d in given])
    for a, b in zip(found, exact, strict=True):
        assert_close(a, b, dtype=torch.float32, gradient=True)


# ---- a norm and the product after it ------------------------------------------------------------


def normed_product():
    """A norm, x, a gate and a projection, all with gradients."""
    norm, module = GatedRMSNorm(6), torch.nn.Linear(12, 10, bias=False)
    norm.weight.data.copy_(torch.randn(6))
    x, gate = torch.randn(2, 2, 9, 2, 6).unbind()
    return norm, x.requires_grad_(), gate.requires_grad_(), module


# Bytes from which the norm is computed again.
@pytest.mark.parametrize("least", [0, 2**25])
@pytest.mark.parametrize("gated", [True, False])
def test_a_norm_and_the_product_after_it(least, gated, monkeypatch):
    monkeypatch.setattr(norms, "LEAST", least)
    norm, x, gate, module = normed_product()
    y = norms.gated_norm_product(norm, x, gate if gated else None, module)
    assert "NormedProduct" in type(y.grad_fn).__name__
    leaves = [x, norm.weight, module.weight, *([gate] if gated else [])]
    exact = wide(leaves)
    n = exact[0] * (exact[0].square().mean(-1, keepdim=True) + 1e-5).rsqrt() * exact[1]
    n = n * F.silu(exact[3]) if gated else n
    assert_as([n.flatten(-2) @ exact[2].mT], exact, [y], leaves)


def test_the_gradient_by_a_gate_is_written_to_its_slot():
    norm, x, gate, module = normed_product()
    slots = []

    def slot(like):
        slots.append(torch.full((2, 9, 20), torch.nan)[..., 8:])
        assert like.shape == slots[-1].shape
        return slots[-1]

    d_y = torch.randn(2, 9, 10)
    given, run = [x, gate, norm.weight, module.weight], norms.gated_norm_product
    plain = torch.autograd.grad(run(norm, x, gate, module), given, d_y)
    found = torch.autograd.grad(run(norm, x, gate, module, slot), given, d_y)
    assert all(map(torch.equal, found, plain))
    assert found[1].data_ptr() == slots[0].data_ptr()


def test_modules_that_are_more_than_a_norm_and_a_product_are_called():
    norm, x, gate, module = normed_product()
    run, plain = norms.gated_norm_product, torch.nn.Linear(12, 10, bias=False)
    handle = norm.register_forward_hook(lambda *_: None)
    assert run(norm, x, gate, module) is None
    handle.remove()
    module.register_forward_pre_hook(lambda *_: None)
    assert run(norm, x, gate, module) is None
    assert run(norm, x, gate, torch.nn.Linear(12, 10)) is None
    assert run(RMSNorm(6), x, gate, plain) is None
    # A norm of all heads together.
    assert run(GatedRMSNorm(12), x, gate, plain) is None


# ---- the feed-forward half ----------------------------------------------------------------------


def built(dtype, inner=24):
    """x, and weights of gate, up and down."""
    shapes = (2, 37, 12), (inner, 12), (inner, 12), (10, inner)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def fused(x, gate, up, down, factor=1.0):
    return direct(mlp.GatedProducts)(x, gate, up, down, factor)


def exact(x, gate, up, down, factor=1.0):
    return (F.silu(factor * (x @ gate.mT)) * (x @ up.mT)) @ down.mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 0.5])
# Weights that share a product, and those with one each.
@pytest.mark.parametrize("small", [0, 2**21])
# A multiple of eight outputs, and another number.
@pytest.mark.parametrize("inner", [24, 13])
def test_all_three_products(inner, dtype, factor, small, monkeypatch):
    monkeypatch.setattr("deltarule.nn.linears.SMALL", small)
    given = built(dtype, inner)
    leaves, y = wide(given), fused(*given, factor)
    expected = exact(*leaves, factor)
    if dtype == torch.float32:
        assert_as([expected], leaves, [y], given)
        return
    assert relative_rms(y, expected) < 2**-9
    d_y = torch.randn(2, 37, 10).to(dtype)
    found = torch.autograd.grad(y, given, d_y)
    gradients = torch.autograd.grad(expected, leaves, d_y.double())
    assert all(relative_rms(x, g) < 2**-8 for x, g in zip(found, gradients, strict=True))


def test_it_keeps_no_product_of_gate_and_up():
    given = built(torch.float32)
    with kept() as tensors:
        fused(*given)
    # x, the weights down and, in one, gate and up; and what both give.
    shapes = [(2, 37, 12), (10, 24), (74, 24), (74, 24), (48, 12)]
    assert [tuple(x.shape) for x in tensors] == shapes


def test_a_backward_leaves_what_was_kept_and_the_given_gradient_as_they_were():
    given = built(torch.float32)
    y, d_y = fused(*given), torch.randn(2, 37, 10)
    before = [x.detach().clone() for x in (*given, d_y)]
    first = torch.autograd.grad(y, given, d_y, retain_graph=True)
    again = torch.autograd.grad(y, given, d_y)
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, before, (*given, d_y)))


@pytest.mark.parametrize("frozen", range(4))
def test_what_is_frozen_has_no_gradient(frozen):
    given, d_y = built(torch.float32), torch.randn(2, 37, 10)
    expected = torch.autograd.grad(fused(*given), given, d_y)
    given[frozen].requires_grad_(False)
    fused(*given).backward(d_y)
    assert given[frozen].grad is None
    for i, x in enumerate(given):
        assert i == frozen or torch.equal(x.grad, expected[i])


@pytest.fixture
def layer(monkeypatch):
    """A layer that takes kernels here."""
    monkeypatch.setattr(mlp, "why_not_fused", lambda x: None)
    return mlp.SwiGLU(12, 24, gate_multiplier=0.5)


@pytest.mark.parametrize("hooked", [None, "gate_proj", "up_proj", "down_proj"])
def test_a_layer_of_plain_products_is_one_node_and_a_hook_on_any_is_called(layer, hooked):
    called = []
    if hooked:
        getattr(layer, hooked).register_forward_hook(lambda *_: called.append(1))
    x = torch.randn(2, 5, 12, requires_grad=True)
    y = layer(x)
    assert ("GatedProducts" in type(y.grad_fn).__name__) == (not called) == (hooked is None)
    expected = exact(x, *layer.parameters(), 0.5).double()
    assert_close(y, expected, dtype=torch.float32)
    with torch.no_grad():
        assert_close(layer(x), expected, dtype=torch.float32)


def test_a_weight_that_is_more_than_a_tensor_is_multiplied_by_its_module(layer):
    torch.nn.utils.parametrizations.weight_norm(layer.up_proj)
    y = layer(torch.randn(2, 5, 12, requires_grad=True))
    assert "GatedProducts" not in type(y.grad_fn).__name__
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("gate", [-80.0, 80.0, 1e4])
def test_large_gates_give_no_nan(gate):
    gates, up = torch.full((1, 3), gate, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    h = swiglu(gates, up)
    h.sum().backward()
    assert h.isfinite().all()
    assert gates.grad.isfinite().all()


# ---- projections and their convolutions ---------------------------------------------------------


class Layer:
    """Projections of 12 channels to q, k, v, and to a gate and six logits, and histories."""

    def __init__(self):
        sizes = 8, 16, 24, 16, 6
        self.modules = [torch.nn.Linear(12, size, bias=False) for size in sizes]
        self.convolutions = [ShortConv(size) for size in sizes[:3]]
        self.x = torch.randn(2, 37, 12, requires_grad=True)
        self.histories = [torch.randn(2, 3, size, requires_grad=True) for size in sizes[:3]]
        weights = [module.weight for module in (*self.modules, *self.convolutions)]
        self.leaves = [self.x, *weights, *self.histories]

    def run(self):
        given = self.x, self.modules, self.convolutions, self.histories
        return convolved_products.convolved_products(*given, make_layout(self.x, None, None))

    def exact(self):
        """y, other products and next histories in float64, by PyTorch alone; and the leaves."""
        x, *rest = leaves = wide(self.leaves)
        weights, taps, histories = rest[:5], rest[5:8], rest[8:]
        y, after = [], []
        for weight, tap, history in zip(weights, taps, histories, strict=False):
            rows = torch.cat([history, x @ weight.mT], 1).mT
            y.append(F.silu(F.conv1d(rows, tap[:, None], groups=len(tap))).mT)
            after.append(rows.mT[:, -3:])
        return [*y, *[x @ weight.mT for weight in weights[3:]], *after], leaves


def test_projections_and_their_convolutions():
    layer = Layer()
    found = layer.run()
    outputs = [*found.y, *found.others, *found.after]
    assert {type(x.grad_fn).__name__ for x in outputs} == {"ConvolvedProductsBackward"}
    assert_as(*layer.exact(), outputs, layer.leaves)


def test_outputs_without_a_gradient_have_none():
    layer = Layer()
    found, (expected, leaves) = layer.run(), layer.exact()
    d_k = torch.randn(found.y[1].shape)
    gradients = torch.autograd.grad(found.y[1], layer.leaves, d_k, allow_unused=True)
    exact = torch.autograd.grad(expected[1], leaves, d_k.double(), allow_unused=True)
    assert gradients[4] is gradients[5] is None
    for a, b in zip(gradients, exact, strict=True):
        if b is not None:
            assert_close(a, b, dtype=torch.float32, gradient=True)


def test_a_gradient_in_its_slot_is_not_copied_and_one_that_is_kept_stays(monkeypatch):
    from deltarule.ops.fused import short_conv_triton

    copied, copy = [], short_conv_triton.lay_beside
    monkeypatch.setattr(
        short_conv_triton, "lay_beside", lambda *x: copied.append(x[1].shape[1]) or copy(*x)
    )
    layer = Layer()
    found = layer.run()
    outputs = [*found.y, *found.others]
    given = [torch.randn(x.shape) for x in outputs]
    expected = torch.autograd.grad(outputs, layer.leaves[:9], given, retain_graph=True)
    assert copied == [16, 8]
    copied.clear()
    d_gate = given[3]
    for _ in range(2):
        given[3] = slot = found.room.slot(3, found.others[0]).copy_(d_gate)
        gradients = torch.autograd.grad(outputs, layer.leaves[:9], given, retain_graph=True)
        assert all(map(torch.equal, gradients, expected))
        assert torch.equal(slot, d_gate)
    # Six logits are filled up to eight columns in any case.
    assert copied == [8, 8]
    # Nor is a gradient written over that no backward of the products has taken.
    first, second = (found.room.slot(3, found.others[0]).fill_(i) for i in range(2))
    assert (first == 0).all()
    assert (second == 1).all()


def test_modules_that_are_more_than_products_and_taps_are_called(monkeypatch):
    layer = Layer()
    # A weight for which one product is enough has it to itself.
    for small, joined in ((24 * 12 - 1, False), (24 * 12, True)):
        monkeypatch.setattr(convolved_products, "SMALL", small)
        assert (layer.run() is not None) == joined
    layer.convolutions[1] = ShortConv(16, bias=True)
    assert layer.run() is None
    layer = Layer()
    layer.modules[0].register_forward_hook(lambda *_: None)
    assert layer.run() is None
    # Columns of q that no weight has would be none of the kernel's.
    layer = Layer()
    layer.modules[0], layer.convolutions[0] = torch.nn.Linear(12, 6, bias=False), ShortConv(6)
    assert layer.run() is None


# ---- q, k and v without convolutions ------------------------------------------------------------


def test_columns_of_one_product_are_laid_out_once_for_both_passes(monkeypatch):
    class Stop(Exception):
        """The operator is called."""

    given = []

    def operator(q, k, v, **_):
        given.extend((q, k, v))
        raise Stop

    monkeypatch.setitem(delta_mixer.OPERATORS, "delta_rule", operator)
    layer = LinearAttention(32, num_heads=2, conv_size=0)
    x = torch.randn(1, 40, 32, requires_grad=True)
    expected = layer.v_proj(x).double()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(Stop):
        layer(x)
    monkeypatch.undo()
    assert all(y.is_contiguous() for y in given)
    assert_close(given[2].flatten(-2), expected, dtype=torch.float32)


# ---- embeddings ---------------------------------------------------------------------------------


def test_a_look_up_has_a_node_of_its_own_and_what_is_more_is_called(monkeypatch):
    monkeypatch.setattr(embedding, "why_not_fused", lambda x: None)
    monkeypatch.setattr(embedding, "is_hopper", lambda device: True)
    tokens = torch.randint(20, (2, 30))

    def is_node(module):
        y = embedding.embedded(module, tokens)
        assert torch.equal(y, module(tokens))
        return "Embedded" in type(y.grad_fn).__name__

    plain = torch.nn.Embedding(20, 8)
    assert is_node(plain)
    others = {"padding_idx": 3}, {"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}
    assert not any(is_node(torch.nn.Embedding(20, 8, **other)) for other in others)
    assert is_node(torch.nn.Embedding(600, 8))
    plain.register_forward_hook(lambda *_: None)
    assert not is_node(plain)


# ---- what autocast rounds -----------------------------------------------------------------------


@pytest.fixture
def fused_everywhere(monkeypatch):
    for module in (norms, mlp, linears):
        monkeypatch.setattr(module, "why_not_fused", lambda x: None)


def step_of(model, tokens, backwards=1):
    """Loss, gradients and nodes. Triton's interpreter cuts bfloat16 short: float16 it is."""
    for _ in range(backwards):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model.logits(model.hidden(tokens)[0]).float().logsumexp(-1).mean()
        nodes = nodes_of(loss)
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return loss, gradients, nodes


def small_model(layer="gated_deltanet", **changes):
    config = {"vocab_size": 50, "hidden_size": 32, "num_layers": 2, "num_heads": 2} | changes
    return CausalLM(ModelConfig(layer_types=layer, **config)), torch.randint(50, (2, 19))


@pytest.mark.usefixtures("fused_everywhere")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_norms_and_weights_are_rounded_as_autocast_rounds_them(
    checkpointing, backwards, tied, monkeypatch
):
    model, tokens = small_model(tie_embeddings=tied)
    model.activation_checkpointing = checkpointing
    loss, gradients, nodes = step_of(model, tokens, backwards)
    if not checkpointing:
        assert nodes.count("NormForProductsBackward") == 4
    # As PyTorch rounds them: each norm by a cast after it, each weight by one of its own.
    monkeypatch.setattr(norms, "rounds_to", lambda *_: None)
    monkeypatch.setattr(linears, "why_not_fused", lambda x: "not here")
    expected, plain, nodes = step_of(model, tokens, backwards)
    assert "NormForProductsBackward" not in nodes
    assert torch.equal(loss, expected)
    assert all(torch.equal(gradients[name], plain[name]) for name in plain)
    assert {d.dtype for d in gradients.values()} == {torch.float32}


@pytest.mark.usefixtures("fused_everywhere")
@pytest.mark.parametrize(
    ("layer", "changes", "count"),
    [
        # The gate of a decay reads the mixer's norm by itself: float32 is where both are summed.
        ("kda", {}, 2), ("gla", {}, 2), ("gated_deltanet2", {}, 2),
        ("deltanet+attention", {}, 2), ("deltanet", {}, 4),
        ("deltanet", {"deepnorm_alpha": 2.0}, 0), ("deltanet", {"norm_type": "layer"}, 0),
        ("deltanet", {"hidden_act": "relu2"}, 2), ("deltanet", {"mlp_size": 0}, 2),
    ],
)  # fmt: skip
def test_a_norm_that_others_read_too_is_not_rounded(layer, changes, count):
    model, tokens = small_model(layer, **changes)
    assert step_of(model, tokens)[2].count("NormForProductsBackward") == count


@pytest.mark.usefixtures("fused_everywhere")
@pytest.mark.parametrize("hooked", ["mixer", "mixer.q_proj", "mixer_norm", "mlp", "mlp.up_proj"])
def test_a_hook_is_given_what_it_was(hooked):
    model, tokens = small_model()
    seen = []
    part = model.blocks[1].get_submodule(hooked)
    part.register_forward_hook(lambda module, given, y: seen.append(given[0].dtype))
    assert step_of(model, tokens)[2].count("NormForProductsBackward") == 3
    # The norm of a sum is made by no call of its module.
    assert seen == ([] if hooked == "mixer_norm" else [torch.float32])


@pytest.mark.usefixtures("fused_everywhere")
def test_without_autocast_or_gradients_nothing_is_rounded():
    model, tokens = small_model()
    assert "NormForProductsBackward" not in nodes_of(model.hidden(tokens)[0])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        assert model.hidden(tokens)[0].dtype == torch.float32


@pytest.mark.parametrize("width", [8, 5])
def test_weights_of_several_matrices_are_rounded_by_one_launch(width, monkeypatch):
    monkeypatch.setattr(linears, "why_not_fused", lambda x: None)
    x, sizes = torch.zeros(1, dtype=torch.float16), (16, 6, 30)
    weights = [torch.randn(size, width) for size in sizes]
    matrices, lacking = [weights[:2], weights[2], weights[0]], [[0, 2]]
    from deltarule.ops.fused import rounding_triton

    launched, laid = [], rounding_triton.laid
    monkeypatch.setattr(rounding_triton, "laid", lambda *x: launched.append(1) or laid(*x))
    both, middle, last = linears.rounded(matrices, lacking, x)
    zeros = torch.zeros(2, width)
    assert torch.equal(both, torch.cat([*weights[:2], zeros]).half())
    assert torch.equal(middle, weights[2].half())
    assert torch.equal(last, weights[0].half())
    # Products begin on the grid of 16 bytes.
    assert not (last.data_ptr() | middle.data_ptr() | both.data_ptr()) % 16
    # What one launch does not take has the same numbers.
    turned = [[w.mT.contiguous().mT for w in weights[:2]], weights[2]]
    half = [[w.half().float() for w in weights[:2]], weights[2].double()]
    for others in (turned, half):
        assert torch.equal(linears.rounded(others, lacking, x)[0], both)
    assert launched == [1]
    many = linears.rounded([weights[0]] * 7, [], x)
    assert all(torch.equal(w, last) for w in many)
    assert launched == [1]
