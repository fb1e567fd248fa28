"""On a GPU: what a model keeps for its backward pass, and attention, against float64."""

import copy

import pytest
import torch

import deltarule
from deltarule.models import CausalLM, ModelConfig
from deltarule.nn import Attention, GatedDeltaNet, convolved_products, mlp
from nn.layers import inputs, make
from nodes import nodes_of
from tolerance import relative_rms

pytestmark = pytest.mark.gpu
SIZES = {"vocab_size": 64, "hidden_size": 1024, "num_heads": 8, "mlp_size": 2816}


def built(layers, mixer="deltanet"):
    config = ModelConfig(layer_types=mixer, num_layers=layers, **SIZES)
    return CausalLM(config).to("cuda", torch.bfloat16)


def in_use():
    """Bytes that were asked for: those that were given depend on what was free."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def kept(layers, tokens):
    """Bytes that a forward leaves behind."""
    model = built(layers)
    model.hidden(tokens)[0].sum().backward()
    model.zero_grad(set_to_none=True)
    before = in_use()
    y = model.hidden(tokens)[0]
    after = in_use()
    y.sum().backward()
    return after - before


def test_a_block_keeps_16_times_its_input():
    # Stream 2, projections 3, operator 4, its output 1, gate and up 5.5; some of each for gates and
    # scalings. FLA's keeps 18.
    # Of fewer rows the sequences are split, of shorter ones the final states count.
    tokens = torch.randint(64, (6, 4096), device="cuda")
    each = (kept(4, tokens) - kept(2, tokens)) / 2
    assert each / (tokens.numel() * SIZES["hidden_size"] * 2) < 15.9


@pytest.mark.parametrize("mixer", ["deltanet", "gated_deltanet", "kda"])
def test_gradients_are_those_of_a_model_that_keeps_everything(mixer):
    model, tokens = built(2, mixer), torch.randint(64, (2, 300), device="cuda")
    weight = torch.randn(2, 300, SIZES["hidden_size"], device="cuda", dtype=torch.bfloat16)

    def gradients():
        model.zero_grad()
        (model.hidden(tokens)[0] * weight).sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    found = gradients()
    # Hooks of the user's, which leave everything where it is.
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        plain = gradients()
    assert found.keys() == plain.keys()
    for name, gradient in found.items():
        # The norm of a sum is computed again by the norm alone, which may add in another order.
        assert relative_rms(gradient, plain[name]) < 2**-8, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_an_mlp_agrees_with_the_cpu_in_float64(dtype, autocast):
    layer = mlp.SwiGLU(256, 704)
    x = torch.randn(2, 130, 256).to(dtype)
    exact = x.double().requires_grad_()
    layer.to(dtype).double()
    layer(exact).square().sum().backward()
    expected = {name: p.grad for name, p in layer.named_parameters()} | {"x": exact.grad}
    layer.zero_grad()
    layer.to("cuda", torch.float32 if autocast else dtype)
    given = x.cuda().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        y = layer(given)
    assert "GatedProducts" in type(y.grad_fn).__name__
    y.float().square().sum().backward()
    found = {name: p.grad for name, p in layer.named_parameters()} | {"x": given.grad}
    bar = 2e-2 if autocast or dtype == torch.bfloat16 else 1e-5
    for name, gradient in found.items():
        assert relative_rms(gradient, expected[name]) < bar, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("large", [False, True])
def test_a_mixer_agrees_with_the_cpu_in_float64_each_time(dtype, large, monkeypatch):
    monkeypatch.setattr(convolved_products, "SMALL", 0 if large else 2**21)
    torch.manual_seed(0)
    layer = GatedDeltaNet(192, num_heads=6)
    x, d_y = torch.randn(2, 2, 130, 192).to(dtype).unbind()
    layer.to(dtype).double()
    exact = x.double().requires_grad_()
    layer(exact)[0].backward(d_y.double())
    expected = {name: p.grad for name, p in layer.named_parameters()} | {"x": exact.grad}
    layer.to("cuda", dtype)
    bar = 5e-2 if dtype == torch.bfloat16 else 1e-4
    # From the third on its launches are repeated.
    for _ in range(4):
        layer.zero_grad()
        given = x.cuda().requires_grad_()
        y, _ = layer(given)
        assert ("ConvolvedProductsBackward" in nodes_of(y)) is not large
        y.backward(d_y.cuda())
        found = {name: p.grad for name, p in layer.named_parameters()} | {"x": given.grad}
        for name, gradient in found.items():
            assert relative_rms(gradient, expected[name]) < bar, name


# The filters of these come through three sines of 14 times their input: float32 leaves 1e-4.
SINES = "hyena", "multi_head_hyena"
OTHERS = ["kda", "mamba2", "deltanet", *SINES, "slstm", "block_deltanet"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_mixers_agree_with_the_cpu_in_float64_in_one_pass_and_two(name):
    layer, x = make(name), inputs(2, 40)
    exact = copy.deepcopy(layer).double()
    layer.cuda()
    if name in SINES:
        exact.taps = lambda: layer.taps().detach().double().cpu()
    expected = exact(x.double())[0]
    y, state = layer(x[:, :25].cuda())
    second, _ = layer(x[:, 25:].cuda(), state)
    assert relative_rms(torch.cat([y, second], 1), expected) < 1e-4
    whole = layer(x.cuda())[0]
    assert relative_rms(whole, expected) < 1e-4
    whole.square().sum().backward()
    expected.square().sum().backward()
    for (key, p), q in zip(layer.named_parameters(), exact.parameters(), strict=True):
        assert p.grad is None or p.grad.isfinite().all(), key
        if name not in SINES and q.grad is not None:
            assert relative_rms(p.grad, q.grad, floor=1e-6) < 1e-3, key


def test_a_compiler_sees_the_modules():
    layer = mlp.SwiGLU(64, 176).cuda()
    x = torch.randn(2, 30, 64, device="cuda", requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-5)


LENGTHS = [700, 0, 1, 900, 447]


def attention(kv_heads=2, head_dim=32):
    torch.manual_seed(0)
    return Attention(64, num_heads=4, num_kv_heads=kv_heads, head_dim=head_dim).cuda()


def attended(layer, x, *given, **options):
    x = x.detach().clone().requires_grad_()
    y, _ = layer(x, *given, **options)
    (dx,) = torch.autograd.grad(y.double().sin().sum(), x)
    return y, dx


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "continued"])
def test_packed_and_continued_attention(packed, dtype, kv_heads):
    layer = attention(kv_heads).to(dtype)
    exact = copy.deepcopy(layer).double()
    if packed:
        x, offsets = torch.randn(1, sum(LENGTHS), 64, device="cuda"), deltarule.pack(LENGTHS).cuda()
        sides = [(layer, x.to(dtype)), (exact, x.to(dtype).double())]
        found, expected = (attended(*side, cu_seqlens=offsets) for side in sides)
    else:
        x = torch.randn(2, 1900, 64, device="cuda").to(dtype)
        mask = torch.ones(2, 800, dtype=torch.bool, device="cuda")
        mask[0, 30:100] = False
        with torch.no_grad():
            states = [f(y[:, :800], mask=mask)[1] for f, y in ((layer, x), (exact, x.double()))]
        found = attended(layer, x[:, 800:], states[0])
        expected = attended(exact, x[:, 800:].double(), states[1])
    bar = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for one, other in zip(found, expected, strict=True):
        assert relative_rms(one, other) < bar


def test_memory_of_packed_tokens_is_linear():
    layer, peaks = attention(4).bfloat16(), []
    for tokens in (8192, 32768):
        x = torch.randn(1, tokens, 64, device="cuda", dtype=torch.bfloat16)
        offsets = deltarule.pack([tokens // 8] * 8).cuda()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attended(layer, x, cu_seqlens=offsets)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 4.5 * peaks[0]
