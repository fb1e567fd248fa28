"""Decoding on fixed buffers: the tokens of the path that calls the model anew for each token."""

import pytest
import torch

from deltarule.models import adjoined
from deltarule.models import decoder as decoding
from deltarule.models.decoder import captured, lend, release_graphs
from deltarule.models.prompts import side_by_side
from deltarule.nn import MIXERS
from models.checkpoints import MIXED, check_graphs

GPU = pytest.mark.gpu


@pytest.mark.parametrize("name", [MIXED, *MIXERS], ids=str)
def test_tokens_on_buffers_are_those_of_separate_calls(
    name, device, make_model, random_tokens, on_buffers
):
    layers = {} if name == MIXED else {"layer_types": name, "num_layers": 2}
    model = make_model(**layers).to(device)
    # More than layers read token by token.
    prompts = [random_tokens(n, seed=n).tolist() for n in (40, 3)]
    kinds = [{"temperature": 0}, {"seed": 3, "top_k": 40, "top_p": 0.9}]
    if name == MIXED:
        kinds += [{"seed": 3, "min_p": 0.02, "repetition_penalty": 1.3, "stop": [7]}]
    for options in kinds:
        check_graphs(model, prompts, max_new_tokens=12, **options)
    release_graphs(model)


def test_a_kept_step_is_taken_again_only_where_it_holds(make_model, on_buffers):
    model = make_model()
    greedy, drawn = decoding.Sampling(0, None, None), decoding.Sampling(1.0, None, None)

    def taken(sampling, prompts):
        held = adjoined.places(tuple(model.parameters()))
        given = side_by_side(prompts, None, torch.device("cpu"))
        call = captured(model, held, given, torch.zeros(2), None, sampling, 5)
        with torch.no_grad(), call as decoder:
            return decoder

    first = taken(greedy, [[1, 2, 3], [4, 5, 6]])
    assert taken(greedy, [[7, 8, 9], [1, 1, 1]]) is first
    assert taken(drawn, [[1, 2, 3], [4, 5, 6]]) is not first
    # Of prompts of another length the cache of attention has another size.
    assert taken(greedy, [[1, 2], [4, 5]]) is not first
    model.embedding.weight = torch.nn.Parameter(model.embedding.weight.clone())
    assert taken(greedy, [[1, 2, 3], [4, 5, 6]]) is not first


def test_a_model_without_states_has_a_step_for_each_number_of_rows(
    make_model, device, random_tokens, on_buffers
):
    model = make_model(layer_types="mlp", num_layers=2).to(device)
    for rows in (3, 2):
        prompts = random_tokens(rows, 5).tolist()
        check_graphs(model, prompts, max_new_tokens=6, temperature=0)
    release_graphs(model)


def test_weights_are_laid_side_by_side_only_where_they_have_moved(make_model, monkeypatch):
    model, laid = make_model(layer_types="kda", num_layers=2), []
    adjoin = adjoined.adjoin

    def noted(modules):
        laid.append(modules)
        adjoin(modules)

    monkeypatch.setattr(adjoined, "adjoin", noted)
    for _ in range(2):
        adjoined.adjoin_projections(model, tuple(model.parameters()))
    # A mixer and an MLP in each of the blocks, once.
    assert len(laid) == 4
    model.blocks[1].mlp.gate_proj.weight.data = model.blocks[1].mlp.gate_proj.weight.clone()
    adjoined.adjoin_projections(model, tuple(model.parameters()))
    assert len(laid) == 8
    gate, up = (module.weight for module in model.blocks[1].mlp.of_input().values())
    assert up.data_ptr() == gate.data_ptr() + gate.nbytes


def test_damaged_logits_are_told_from_the_step_that_made_them(make_model, on_buffers):
    model = make_model()
    stream = model.stream([1], max_new_tokens=9)
    next(stream)
    with torch.no_grad():
        model.embedding.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN or infinite"):
        list(stream)


def test_a_lent_cache_takes_one_token_at_a_time(make_model):
    model = make_model(layer_types="attention")
    state = lend(model, model(torch.ones(2, 3, dtype=torch.int64))[1], 5)
    with pytest.raises(ValueError, match="one token with a lent cache"):
        model(torch.ones(2, 2, dtype=torch.int64), state)


@GPU
def test_small_memory_of_others_is_not_what_a_graph_counts_in(make_model, random_tokens) -> None:
    """Products of a few rows, whose inputs are so many that programs share them, count arrivals."""
    options = {"hidden_size": 512, "num_heads": 4, "num_layers": 2}
    model = make_model(layer_types="gated_deltanet", **options).cuda().bfloat16()
    prompts = [random_tokens(9, seed=n).tolist() for n in range(4)]
    tokens = {"max_new_tokens": 12, "temperature": 0}
    expected = model.generate(prompts, cuda_graphs=False, **tokens)
    model.generate(prompts, **tokens)
    others = [torch.ones(n, dtype=torch.int32, device="cuda") for n in (128, 256) * 2048]
    assert model.generate(prompts, **tokens) == expected
    assert all((other == 1).all() for other in others)


@GPU
def test_hooks_see_every_token(make_model, random_tokens) -> None:
    model = make_model(layer_types="gated_deltanet", num_layers=2).cuda().bfloat16()
    prompt, seen = [random_tokens(9).tolist()], []
    for _ in range(3):
        model.generate(prompt, max_new_tokens=4)
    hook = model.blocks[0].register_forward_hook(lambda *given: seen.append(1))
    model.generate(prompt, max_new_tokens=4)
    hook.remove()
    assert len(seen) == 4


class Quantised:
    """A weight as torchao keeps one: tensors by name."""

    def __init__(self, **parts):
        vars(self).update(parts)

    def __tensor_flatten__(self):
        return list(vars(self)), None


def test_a_quantised_weight_is_read_where_its_parts_lie(monkeypatch):
    qdata, scale, bias = torch.zeros(2, 3, dtype=torch.int8), torch.ones(2, 1), torch.ones(2)
    weight = Quantised(qdata=qdata, inner=Quantised(scale=scale))
    # Another library's tensors may wait for the GPU, which no graph can.
    assert adjoined.tensors_of(weight) == []
    monkeypatch.setattr(Quantised, "__module__", "torchao.quantization")
    found = adjoined.tensors_of(weight) + adjoined.tensors_of(torch.nn.Parameter(bias))
    assert [x.data_ptr() for x in found] == [x.data_ptr() for x in (qdata, scale, bias)]
