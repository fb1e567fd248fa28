"""Prompts as graphs: the tokens of an eager pass, whatever the prompts and whatever came before."""

import weakref

import pytest
import torch

from deltarule.models import decoder as decoding
from deltarule.models import prompts as reading
from deltarule.models.decoder import Reading, release_graphs
from deltarule.models.prompts import columns, most_tokens, side_by_side
from deltarule.nn import MIXERS
from models.checkpoints import MIXED, same_states
from tolerance import relative_rms

ALONE = ("gated_deltanet", "kda", "mamba2", "rwkv7", "titans_linear", "slstm")
FAMILIES = {
    "mixed": {}, **{name: {"layer_types": name, "num_layers": 2} for name in ALONE},
    "attention": {"layer_types": "attention", "num_layers": 2, "num_kv_heads": 1},
    "latent attention": {"layer_types": "attention", "num_layers": 2, "kv_lora_rank": 8},
    "experts": {
        "mlp_layer_types": ("dense", "sparse", "sparse", "dense"), "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
}  # fmt: skip
# As many as a GPU has columns, so that the rows of some calls have no padding.
LENGTHS = [(64, 3), (64, 64), (64, 50), (64, 64), (64, 1), (64, 64)]


def given(random_tokens, *lengths, seed=0):
    return [random_tokens(n, seed=seed + n).tolist() for n in lengths]


def captured_kinds(model):
    kept = decoding._captured.get(model, [])
    return [x for _, decoder in kept for x in decoder.readings.values() if isinstance(x, Reading)]


@pytest.mark.parametrize("name", [*MIXERS, MIXED], ids=str)
def test_columns_of_padding_change_neither_logits_nor_states(
    name, make_model, random_tokens, monkeypatch
):
    options = {} if name == MIXED else {"layer_types": name, "num_layers": 2}
    model, cpu = make_model(**options).double(), torch.device("cpu")
    prompts = given(random_tokens, 9, 4)
    with torch.no_grad():
        expected, before = side_by_side(prompts, None, cpu).read(model)
        monkeypatch.setattr(reading, "columns", lambda *sizes: 12)
        padded = side_by_side(prompts, None, cpu)
        assert padded.tokens.shape == (2, 12)
        logits, state = padded.read(model)
        assert relative_rms(logits, expected) < 1e-12
        # Attention's rows of padding count for nothing: what follows is the same.
        more = torch.tensor([[5], [6]])
        assert relative_rms(model(more, state)[0], model(more, before)[0]) < 1e-12


def test_close_lengths_of_short_prompts_share_columns():
    assert {columns(n, 1, 4096) for n in range(2, 17)} == {16}
    assert {columns(n, 1, 4096) for n in range(65, 129)} == {128}
    assert {columns(n, 1, 4096) for n in range(1025, 1153)} == {1152}
    # What keeps a GPU busy is not made longer.
    assert [columns(n, 32, 4096) for n in (128, 129, 1000)] == [128, 129, 1000]
    assert [columns(n, 3, 0) for n in (1, 5, 100)] == [1, 5, 100]


def test_prompts_are_short_as_far_as_a_gpu_waits_for_python():
    weights = [torch.empty(1000, 1000, device="meta")] * 96
    assert most_tokens(weights, 24) == 2**15
    assert most_tokens(weights * 20, 24) == 3750
    assert most_tokens(weights * 20, 48) == 7500


@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_of_a_prompt_gives_the_tokens_of_an_eager_pass(
    family, device, make_model, random_tokens, on_buffers
):
    model = make_model(**FAMILIES[family]).to(device)
    for options in ({"temperature": 0}, {"seed": 3, "top_k": 40, "repetition_penalty": 1.3}):
        for seed, lengths in enumerate(LENGTHS):
            prompts = given(random_tokens, *lengths, seed=seed)
            eager = model.generate(prompts, max_new_tokens=4, cuda_graphs=False, **options)
            assert model.generate(prompts, max_new_tokens=4, **options) == eager
    kinds = captured_kinds(model)
    # Padded and not, twice each.
    assert len(kinds) == 0 if family == "experts" and device == "cuda" else len(kinds) == 4
    assert all((x.graph is not None) == (device == "cuda") for x in kinds)
    kept = weakref.ref(decoding._captured[model][-1][1]) if kinds else lambda: None
    del kinds
    release_graphs(model)
    assert kept() is None


@pytest.mark.parametrize("rows", [1, 2])
def test_a_graph_continues_the_state_that_a_call_is_given(
    rows, device, make_model, random_tokens, on_buffers
):
    model = make_model().to(device)
    for seed in range(4):
        prompts = given(random_tokens, 4, 2, seed=seed)
        with torch.no_grad():
            _, state = model(random_tokens(rows, 7, seed=seed).to(device))
        before = state.clone()
        options = {"max_new_tokens": 4, "state": state, "temperature": 0}
        eager = model.generate(prompts, cuda_graphs=False, **options)
        assert model.generate(prompts, **options) == eager
        same_states(state, before)
    assert len(captured_kinds(model)) == 1


def test_a_graph_reads_parameters_as_they_are(device, make_model, random_tokens, on_buffers):
    model = make_model().to(device)
    prompts = given(random_tokens, 9, 4)

    def same() -> None:
        eager = model.generate(prompts, max_new_tokens=4, temperature=0, cuda_graphs=False)
        assert model.generate(prompts, max_new_tokens=4, temperature=0) == eager

    for _ in range(3):
        same()
    assert len(captured_kinds(model)) == 1
    with torch.no_grad():
        model.embedding.weight.copy_(model.embedding.weight.flip(0))
    same()
    assert len(captured_kinds(model)) == 1
    model.embedding.weight = torch.nn.Parameter(model.embedding.weight.flip(1).clone())
    for _ in range(3):
        same()
    assert len(captured_kinds(model)) == 2


def test_streams_of_one_kind_of_prompt_do_not_meet(device, make_model, random_tokens, on_buffers):
    model = make_model().to(device)
    prompts = [random_tokens(9, seed=seed).tolist() for seed in range(2)]
    expected = [model.generate([p], max_new_tokens=9, seed=0)[0] for p in prompts * 2][:2]
    assert len(captured_kinds(model)) == 1
    streams = [model.stream(p, max_new_tokens=9, seed=0) for p in prompts]
    found = [list(row) for row in zip(*zip(*streams, strict=True), strict=True)]
    assert found == expected
    assert len(decoding._captured[model]) == 2
    release_graphs(model)
    assert model not in decoding._captured


def test_only_the_latest_kinds_of_short_prompts_are_kept(make_model, on_buffers, monkeypatch):
    model = make_model(layer_types="gated_deltanet", num_layers=1)
    monkeypatch.setattr("deltarule.models.generate.most_tokens", lambda *sizes: 640)
    for length in (641, 641, *range(1, 640, 64), 600):
        model.generate([[1] * length], max_new_tokens=1)
    ((_, decoder),) = decoding._captured[model]
    assert [kind[0][0][1] for kind in decoder.readings] == [*range(192, 641, 64)]
    assert isinstance(decoder.readings.popitem()[1], Reading)
