"""What every layer of the table promises."""

import copy
import io
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import deltarule
from deltarule.models import linear_next_token_loss, next_token_loss
from deltarule.nn import MIXERS, RULES, SYSTEMS, DeltaMixer, Mixer, State
from deltarule.nn.feature_maps import FEATURE_MAPS
from nn.layers import ATTENTION, HIDDEN, NAMES, RECURRENT, config, inputs, make
from small import small_model
from tolerance import relative_rms

# Where a norm divides by the little that a cancellation leaves, rounding is magnified: float32 is
# measured over many tokens, single tokens are compared in float64.
CLOSE = {torch.float32: 2e-6, torch.float64: 1e-12}
DOUBLE = torch.float64


def assert_same(y: torch.Tensor, expected: torch.Tensor) -> None:
    assert relative_rms(y, expected) <= CLOSE[y.dtype]


def assert_same_state(state: State, expected: State) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert relative_rms(state[name], tensor) <= CLOSE.get(tensor.dtype, 0), name


def by_row(state: State, row: int) -> State:
    """One sequence's state without the rows that hold no token."""
    alone = state.select([row])
    if "valid" not in alone:
        return alone
    valid = alone["valid"][0]
    rows = ("keys", "values", "valid")
    return State({name: t[:, valid] if name in rows else t for name, t in alone.items()})


def test_every_layer_has_a_row_and_every_row_its_layer():
    assert set(SYSTEMS) == set(MIXERS)
    for name, mixer in MIXERS.items():
        assert issubclass(mixer, Mixer), name
        assert mixer.rule is SYSTEMS[name], name
        assert issubclass(mixer, DeltaMixer) == (name in RULES), name


# Single tokens decode, without gradients; in float32 their sums are those of 40.
CUTS = {"each token": (torch.float32, (1,) * 40)}
CUTS |= {f"at {n}": (DOUBLE, (n, 24 - n)) for n in (0, 1, 2, 17, 23, 24)}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in NAMES), ("kda", {"gate_lower_bound": -5.0})]
)
def test_parts_equal_one_pass(name, options, cut):
    dtype, lengths = CUTS[cut]
    layer, x = make(name, dtype, **options), inputs(2, sum(lengths), dtype)
    state, parts = layer.init_state(2) if dtype == torch.float32 else None, []
    with torch.set_grad_enabled(dtype == DOUBLE):
        whole, after = layer(x)
        for part in x.split(lengths, 1):
            y, state = layer(part, state)
            parts.append(y)
    assert_same(torch.cat(parts, dim=1), whole)
    assert_same_state(state, after)
    assert whole.dtype == dtype
    exact = (torch.float32, dtype, torch.int64, torch.bool)
    assert all(t.dtype in exact[dtype == DOUBLE :] for t in state.values())


LENGTHS = [1, 0, 7, 2, 1, 0, 13, 0]


@pytest.mark.parametrize(
    ("name", "continued"), [(x, False) for x in NAMES] + [(x, True) for x in RECURRENT]
)
def test_packed_equals_separate(name, continued):
    layer, x = make(name, DOUBLE), inputs(1, sum(LENGTHS), DOUBLE)
    before = layer(inputs(len(LENGTHS), 6, DOUBLE) + 1)[1] if continued else None
    y, state = layer(x, before, cu_seqlens=deltarule.pack(LENGTHS))
    for row, (part, out) in enumerate(zip(x.split(LENGTHS, 1), y.split(LENGTHS, 1), strict=True)):
        alone, after = layer(part, None if before is None else before.select([row]))
        assert_same(out, alone)
        if name not in ATTENTION:
            assert_same_state(state.select([row]), after)
    assert name not in ATTENTION or state == {}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (1, 0, 0), (1, 0, 2)], ids=str)
def test_nothing_to_read_can_be_learned_from(name, shape):
    """No rows; rows without tokens; no sequences in a packed row, or two without tokens."""
    layer, x = make(name), inputs(*shape[:2]).requires_grad_()
    y, _ = layer(x, cu_seqlens=deltarule.pack([0] * shape[2]) if shape[2:] else None)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape


MASKS = {
    "left": [[0] * 5 + [1] * 9, [1] * 14, [0] * 13 + [1]],
    "right": [[1] * 9 + [0] * 5, [1] * 14, [1] + [0] * 13],
    "middle": [[1] * 4 + [0] * 5 + [1] * 5, [0, 1] * 7, [1, 1, 0, 0, 1, 1, 0] * 2],
    "nothing": [[0] * 14, [1] * 14, [1, 0] * 7],
}


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("pattern", MASKS)
@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_neither_outputs_nor_state(name, pattern, continued):
    layer, x = make(name, DOUBLE), inputs(3, 14, DOUBLE)
    mask = torch.tensor(MASKS[pattern]).bool()
    # What lies under the padding must not matter, not even as 0 * nan.
    x = x.masked_fill(~mask.unsqueeze(-1), float("nan"))
    before = layer(inputs(3, 8, DOUBLE) + 1)[1] if continued else None
    y, state = layer(x, before, mask=mask)
    assert y.isfinite().all()
    for row in range(3):
        start = None if before is None else before.select([row])
        alone, after = layer(x[row : row + 1, mask[row]], start)
        assert_same(y[row : row + 1, mask[row]], alone)
        assert_same_state(by_row(state, row), by_row(after, 0))


@pytest.mark.parametrize("name", NAMES)
def test_padding_gets_no_gradient(name):
    layer, x = make(name), inputs(2, 9).requires_grad_()
    mask = torch.tensor(MASKS["middle"])[:2, :9].bool()
    y, _ = layer(x, mask=mask)
    y[mask].square().sum().backward()
    assert (x.grad[~mask] == 0).all()
    assert (x.grad[mask] != 0).any(-1).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_strictly_causal(name):
    layer, x = make(name), inputs(1, 40)
    changed = x.clone()
    changed[:, 25:] = 1e3 * torch.randn_like(changed[:, 25:])
    y, y_changed = layer(x)[0], layer(changed)[0]
    assert torch.equal(y[:, :25], y_changed[:, :25])
    assert not torch.equal(y[:, 25:], y_changed[:, 25:])


# The first token that what is not finite in token 140 may reach, as docs/design.md has it: that of
# its chunk or mini-batch, and with softmax attention that of its tile or row.
SPREAD = {
    **dict.fromkeys(("s4d", "multi_head_hyena", "mesa"), 128),
    **dict.fromkeys(("ttt_linear", "ttt_mlp", "titans_linear", "titans_mlp"), 128),
    **dict.fromkeys(("attention", "titans_mac", "titans_mag", "titans_mal", "sliding_window"), 0),
}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_reaches_no_earlier_token(name):
    layer, x = make(name, DOUBLE), inputs(1, 150, DOUBLE)
    first = SPREAD.get(name, 140)
    with torch.no_grad():
        expected = layer(x)[0]
        for value in (torch.nan, torch.inf, 1e200):
            y = layer(x.index_fill(1, torch.tensor([140]), value))[0]
            assert relative_rms(y[:, :first], expected[:, :first]) <= 1e-12
            assert not torch.equal(y[:, 140:], expected[:, 140:])


@pytest.mark.parametrize("name", NAMES)
def test_leaves_the_given_state_alone(name):
    layer, x = make(name), inputs(2, 3)
    _, state = layer(x)
    kept = state.clone()
    _, after = layer(x, state)
    assert all(torch.equal(state[key], kept[key]) for key in kept)
    assert all(after[key].data_ptr() != state[key].data_ptr() for key in kept if kept[key].numel())


def assert_gates_alone_are_float32(layer, others):
    for key, parameter in layer.named_parameters():
        exact = key in layer.float32_parameters
        assert parameter.dtype == (torch.float32 if exact else others), key


@pytest.mark.parametrize("cast", ["bfloat16", "half"])
@pytest.mark.parametrize("name", NAMES)
def test_gates_and_their_gradients_stay_in_float32(name, cast):
    layer = make(name)
    layer(inputs(1, 4))[0].sum().backward()
    before = {key: p.clone() for key, p in layer.named_parameters()}
    getattr(layer, cast)()
    assert_gates_alone_are_float32(layer, torch.bfloat16 if cast == "bfloat16" else torch.float16)
    exact = before.keys() & set(layer.float32_parameters)
    assert all(torch.equal(layer.get_parameter(x), before[x]) for x in exact)
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in layer.parameters())
    layer.double()
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    layer.to(torch.bfloat16)
    assert_gates_alone_are_float32(layer, torch.bfloat16)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gates_stay_in_float32_when_16_bits_are_loaded(name, assign):
    layer = make(name)
    stored = {key: p.bfloat16() for key, p in layer.state_dict().items()}
    kept = dict(stored)
    layer.load_state_dict(stored, assign=assign)
    assert_gates_alone_are_float32(layer, torch.bfloat16 if assign else torch.float32)
    for key, parameter in layer.named_parameters():
        assert torch.equal(parameter.bfloat16(), kept[key]), key
    assert all(stored[key] is kept[key] for key in kept)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gates_start_in_float32_whatever_the_default(name, default):
    torch.manual_seed(0)
    expected = dict(MIXERS[name](HIDDEN, num_heads=2, **LATER.get(name, {})).named_parameters())
    torch.set_default_dtype(default)
    try:
        torch.manual_seed(0)
        layer = MIXERS[name](HIDDEN, num_heads=2, **LATER.get(name, {}))
        assert layer(torch.ones(1, 3, HIDDEN))[0].isfinite().all()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_gates_alone_are_float32(layer, default)
    # In float64 other numbers are drawn.
    drawn = () if default == torch.float64 else ("erase_scale", "shift_mix", "decay_bias")
    for key in expected.keys() & drawn:
        assert torch.equal(getattr(layer, key), expected[key]), key


LATER = {"rwkv7": {"layer_index": 1, "num_layers": 3}}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_runs_in_bfloat16_and_under_autocast(name, autocast):
    exact, x = make(name), inputs(2, 20)
    layer = exact if autocast else make(name, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, state = layer(x if autocast else x.bfloat16())
        step, _ = layer(x[:, :1].bfloat16(), state)
    assert relative_rms(y, exact(x)[0]) < 0.05
    assert step.isfinite().all()
    assert autocast or y.dtype == step.dtype == torch.bfloat16
    assert name in ATTENTION or state["recurrent"].dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_from_config(name):
    layer = MIXERS[name].from_config(config(), 1)
    y, _ = layer(inputs(1, 3))
    assert y.shape == (1, 3, HIDDEN)
    sized = config(head_k_dim=4, head_v_dim=6, n_steps=3, beta_max=1.5, window=3, output_gate=False)
    layer = MIXERS[name].from_config(sized, 0)
    if name in ATTENTION:
        assert layer.window == (3 if name == "sliding_window" else None)
    if name not in RULES:
        return
    assert (layer.head_k_dim, layer.head_v_dim, layer.g_proj) == (4, 6, None)
    assert layer.n_steps == (3 if "product" in name else 1)
    assert layer.beta_max == (1.5 if MIXERS[name].takes("beta_max") else 1.0)
    assert layer(inputs(1, 3))[0].shape == (1, 3, HIDDEN)


@pytest.mark.parametrize("name", NAMES)
def test_state_is_cloned_selected_and_detached(name):
    layer, x = make(name, DOUBLE), inputs(3, 5, DOUBLE)
    _, state = layer(x)
    y, after = layer(x, state)
    assert torch.equal(layer(x, state.clone())[0], y)
    chosen, chosen_after = layer(x[[2, 0]], state.select([2, 0]))
    assert_same(chosen, y[[2, 0]])
    assert_same_state(chosen_after, after.select(torch.tensor([2, 0])))
    assert any(t.requires_grad for t in state.values())
    assert not any(t.requires_grad for t in state.detach().values())


X = torch.zeros(2, 4, HIDDEN)
BAD_CALLS = {
    "x must be a tensor": {"x": [[0.0]]},
    r"x must have 3 axes \[B, T, hidden_size\], got \[4, 32\]": {"x": X[0]},
    "x must have hidden_size=32": {"x": X[..., 1:]},
    r"x must be torch.float32 like the layer's weights, got torch.float64: cast one": {
        "x": X.double()
    },
    "x must be torch.float32 like the layer's weights, got torch.int64": {"x": X.long()},
    "x must be torch.float32 like the layer's weights, got torch.bfloat16": {"x": X.bfloat16()},
    r"x is on meta, but the layer is on cpu: move one with .to\(device\)": {"x": X.to("meta")},
    "mask must be a bool": {"mask": torch.ones(2, 4)},
    "mask must be a bool tensor": {"mask": torch.ones(2, 5).bool()},
    "cu_seqlens must end at T = 4, got 3": {"x": X[:1], "cu_seqlens": torch.tensor([0, 3])},
    "cu_seqlens must start at 0": {"x": X[:1], "cu_seqlens": torch.tensor([1, 4])},
    "cu_seqlens must not decrease": {"x": X[:1], "cu_seqlens": torch.tensor([0, 3, 2, 4])},
    "cu_seqlens packs": {"cu_seqlens": torch.tensor([0, 4])},
    "mask must be None with cu_seqlens": {
        "x": X[:1],
        "cu_seqlens": torch.tensor([0, 4]),
        "mask": torch.ones(1, 4).bool(),
    },
    r"state must hold \[.*\], got \['other'\]": {"state": State(other=torch.zeros(2, 1))},
    r"state must hold \[.*\], got list": {"state": [torch.zeros(2, 1)]},
}


@pytest.mark.parametrize("message", BAD_CALLS)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_calls_name_the_argument(name, message):
    given = {"x": X} | BAD_CALLS[message]
    with pytest.raises(ValueError, match=message):
        make(name)(given.pop("x"), given.pop("state", None), **given)


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("name", NAMES)
def test_autocast_excuses_only_what_it_casts(name, given):
    """And where there is none, as on the meta device, nothing."""
    layer, x = make(name), X.to(given)
    if given == torch.bfloat16:
        layer, x = layer.to("meta"), x.to("meta")
    says = pytest.raises(ValueError, match=f"x must be torch.float32 .*, got {given}")
    with torch.autocast("cpu", torch.bfloat16, enabled=given != torch.bfloat16), says:
        layer(x)


EXACT = {"recurrent", "length", "valid", "stabilizer", "log_sum", "covariance"}
BAD_STATES = {
    "must be a tensor [2": lambda t: t.tolist(),
    "must be [2": lambda t: torch.cat([t, t[:1]]),
    ", got torch.bfloat16": lambda t: t.bfloat16(),
    "is on meta, but the layer is on cpu: move it with state.to('cpu')": lambda t: t.to("meta"),
    "sequences first, got []": lambda t: t.sum(),
}


@pytest.mark.parametrize("message", BAD_STATES)
@pytest.mark.parametrize("name", NAMES)
def test_bad_tensors_of_a_state_are_named(name, message):
    layer = make(name)
    _, state = layer(X)
    named = state.keys()
    if "bfloat16" in message:
        named &= EXACT | ({"keys"} if name in ("abc", "gsa") else set())
    for key in named:
        tensor = state[key]
        with pytest.raises(ValueError, match=rf"state\['{key}'\] .*{re.escape(message)}"):
            layer(X, State(state | {key: BAD_STATES[message](tensor)}))


# Their state has one number for each channel.
VECTORS = ("hgrn", "rg_lru", "rwkv4")


@pytest.mark.parametrize("name", NAMES)
def test_a_given_head_size_needs_no_division(name):
    size = {"head_dim": 8} if name in ATTENTION else {"head_k_dim": 8}
    if name in (*VECTORS, "lru"):
        size = {"head_v_dim": 8} | ({"head_k_dim": 8} if name == "lru" else {})
    layer = MIXERS[name](HIDDEN + 1, num_heads=2, **size)
    assert layer(torch.randn(1, 3, HIDDEN + 1))[0].shape == (1, 3, HIDDEN + 1)


# A minute or more in all: they are traced here, and what derives and splits a trace meets their
# operators in tests/ops.
LONG = ("mesa", *(name for name in NAMES if name.startswith(("ttt", "titans"))))


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "eager" if name in LONG else "aot_eager") for name in NAMES),
        *(pytest.param(name, "aot_eager", marks=pytest.mark.slow) for name in LONG),
    ],
)
def test_compiles_without_a_break(name, backend):
    layer, x = make(name), inputs(1, 12)
    cu_seqlens = deltarule.pack([5, 7])
    torch.compiler.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    y, _ = compiled(x, cu_seqlens=cu_seqlens)
    assert_same(y, layer(x, cu_seqlens=cu_seqlens)[0])
    y.sum().backward()
    assert layer.o_proj.weight.grad.isfinite().all()
    if name not in LONG:
        with torch.no_grad():
            _, state = layer(x[:, :9])
            assert_same(compiled(x[:, 9:], state)[0], layer(x)[0][:, 9:])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", NAMES)
def test_vmap_runs_many_layers_at_once(name):
    layers = [make(name) for _ in range(3)]
    with torch.no_grad():
        for index, layer in enumerate(layers):
            layer.v_proj.weight *= 1 + index
    weights = torch.func.stack_module_state(layers)
    empty = copy.deepcopy(layers[0]).to("meta")

    def call(parameters, buffers, x, state=None):
        return torch.func.functional_call(empty, (parameters, buffers), (x, state))

    def loss(*given):
        return call(*given)[0].square().sum()

    x = torch.stack([inputs(2, 6), inputs(2, 6) + 1, inputs(2, 6) - 1])
    y, state = torch.vmap(call)(*weights, x)
    second, _ = torch.vmap(call)(*weights, x, state)
    gradients = torch.vmap(torch.func.grad(loss))(*weights, x)
    assert isinstance(state, State)
    for index, layer in enumerate(layers):
        alone, after = layer(x[index])
        alone.square().sum().backward()
        assert_same(y[index], alone)
        assert_same(second[index], layer(x[index], after)[0])
        assert relative_rms(gradients["v_proj.weight"][index], layer.v_proj.weight.grad) <= 1e-5


@pytest.mark.parametrize("kind", ["fake", "meta"])
@pytest.mark.parametrize("name", NAMES)
def test_models_take_tokens_and_offsets_without_values(name, kind):
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        model = small_model(name, **({"window": 4} if MIXERS[name].takes("window") else {}))
        tokens = torch.randint(257, (1, 9))
        _, state = model(tokens)
        model(tokens, state, mask=torch.ones(1, 9, dtype=torch.bool))
        packed, _ = model(tokens, cu_seqlens=torch.tensor([0, 3, 9]))
        next_token_loss(packed, tokens).backward()
        x, _ = model.hidden(tokens)
        linear_next_token_loss(x, model.embedding.weight, tokens).backward()
    assert packed.shape == (1, 9, 257)
    assert all(p.grad is None or p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_another_default_device_changes_nothing(name):
    """As torch.set_default_device("cuda") beside a layer that is on the CPU."""
    layer, x, offsets = make(name), inputs(1, 9), torch.tensor([0, 3, 9])
    mask = torch.arange(9).unsqueeze(0) > 2
    y, state = layer(x, mask=mask)
    packed, step = layer(x, cu_seqlens=offsets)[0], layer(x[:, :1], state)[0]
    with torch.device("meta"):
        assert torch.equal(layer(x, mask=mask)[0], y)
        assert torch.equal(layer(x, cu_seqlens=offsets)[0], packed)
        assert torch.equal(layer(x[:, :1], state)[0], step)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_the_parameters_of_models():
    models, tokens = [small_model("gated_deltanet") for _ in range(2)], torch.randint(257, (1, 6))
    weights = torch.func.stack_module_state(models)
    run = lambda *given: torch.func.functional_call(models[0], given, (tokens,))[0]  # noqa: E731
    for found, model in zip(torch.vmap(run)(*weights), models, strict=True):
        torch.testing.assert_close(found, model(tokens)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("gated_rfa", *NAMES[::5])),
        *(("linear_attention", {"feature_map": name}) for name in FEATURE_MAPS),
    ],
)
def test_layers_are_saved_whole(name, options):
    layer, x, file = make(name, **options), inputs(1, 4), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x)[0], layer(x)[0])
