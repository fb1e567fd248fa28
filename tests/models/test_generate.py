import itertools

import pytest
import torch

from deltarule.models.bytes import BEGIN

RECURRENT = ("gated_deltanet", "sliding_window", "rwkv7", "mamba2")


def greedy_without_cache(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        logits, _ = model(torch.tensor([tokens]))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_equals_the_argmax_without_a_cache(make_model, random_tokens):
    model = make_model()
    prompt = random_tokens(9).tolist()
    expected = greedy_without_cache(model, prompt, 20)
    assert model.generate([prompt], max_new_tokens=20, temperature=0) == [expected]


def test_prompts_of_unequal_length_equal_each_alone(make_model, random_tokens):
    model = make_model()
    prompts = [random_tokens(n, seed=n).tolist() for n in (9, 1, 4, 16)] + [[]]
    together = model.generate(prompts, max_new_tokens=12, temperature=0)
    for prompt, row in zip(prompts, together, strict=True):
        assert row == greedy_without_cache(model, prompt or [BEGIN], 12)


def test_sampled_rows_do_not_depend_on_their_neighbours(make_model, random_tokens):
    model = make_model()
    prompts = [random_tokens(n, seed=n).tolist() for n in (5, 2, 8)]
    together = model.generate(prompts, max_new_tokens=15, seed=40)
    for row, prompt in enumerate(prompts):
        assert model.generate([prompt], max_new_tokens=15, seed=40 + row) == [together[row]]


def test_the_seed_decides(make_model):
    model = make_model()
    rows = [model.generate([[1], [1]], max_new_tokens=15, seed=seed) for seed in (3, 3, 4)]
    assert rows[0] == rows[1] != rows[2]
    assert rows[0][0] != rows[0][1]
    fresh = [model.generate([[1]], max_new_tokens=15) for _ in range(2)]
    assert fresh[0] != fresh[1]


def test_the_global_random_state_is_left_alone(make_model):
    model = make_model()
    before = torch.get_rng_state()
    model.generate([[1]], max_new_tokens=5)
    list(model.stream([1], max_new_tokens=5, seed=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_no_gradient_graph_grows(make_model, monkeypatch):
    model = make_model()
    modes = []
    logits = model.logits
    monkeypatch.setattr(
        model, "logits", lambda x: modes.append(torch.is_grad_enabled()) or logits(x)
    )
    for _ in model.stream([1], max_new_tokens=3):
        assert torch.is_grad_enabled()
    assert modes == [False] * 3


def test_tensors_are_prompts_too(make_model, random_tokens):
    model = make_model()
    prompts = random_tokens(2, 4)
    lists = model.generate(prompts.tolist(), max_new_tokens=3, temperature=0)
    assert model.generate([*prompts], max_new_tokens=3, temperature=0) == lists


def test_a_stop_token_ends_its_row_only(make_model, random_tokens):
    model = make_model()
    prompts = [random_tokens(4, seed=seed).tolist() for seed in range(3)]
    full = model.generate(prompts, max_new_tokens=12, seed=0)
    stop = full[1][5]
    got = model.generate(prompts, max_new_tokens=12, seed=0, stop=[stop])
    for row, expected in zip(got, full, strict=True):
        end = expected.index(stop) + 1 if stop in expected else 12
        assert row == expected[:end]
    assert len(got[1]) <= 6


def test_a_stop_sequence_counts_in_the_added_tokens_only(make_model, random_tokens):
    model = make_model()
    prompt = random_tokens(4).tolist()
    full = model.generate([prompt], max_new_tokens=12, seed=0)[0]
    got = model.generate([prompt], max_new_tokens=12, seed=0, stop=[full[4:7]])
    assert got == [full[:7]]
    crossing = [prompt[-1], full[0]]
    assert model.generate([prompt], max_new_tokens=12, seed=0, stop=[crossing]) == [full]


def test_no_new_tokens(make_model):
    assert make_model().generate([[1], []], max_new_tokens=0) == [[], []]
    assert make_model().generate([], max_new_tokens=5) == []
    assert list(make_model().stream([1], max_new_tokens=0)) == []


def test_a_stream_gives_what_generate_gives(make_model, random_tokens):
    model = make_model()
    prompt = random_tokens(4).tolist()
    stream = model.stream(prompt, max_new_tokens=9, seed=2, top_k=50)
    first = list(itertools.islice(stream, 3))
    assert torch.is_grad_enabled()
    rest = list(stream)
    assert [first + rest] == model.generate([prompt], max_new_tokens=9, seed=2, top_k=50)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_prompt_cache_equals_the_whole_prompt(rows, make_model, random_tokens):
    model = make_model()
    cached = random_tokens(1, 7)
    prompts = [random_tokens(n, seed=n).tolist() for n in (2, 5, 1)][:rows]
    _, state = model(cached)
    before = state.clone()
    got = model.generate(prompts, max_new_tokens=8, temperature=0, state=state)
    whole = [cached[0].tolist() + prompt for prompt in prompts]
    assert got == model.generate(whole, max_new_tokens=8, temperature=0)
    for layer, expected in zip(state, before, strict=True):
        assert all(torch.equal(layer[name], expected[name]) for name in expected)


def state_bytes(model, steps):
    """Bytes of the state after each of `steps` tokens."""
    state, sizes = None, []
    for _ in range(steps):
        _, state = model(torch.ones(1, 1, dtype=torch.long), state)
        sizes.append(state.num_bytes)
    return sizes


def test_recurrent_and_sliding_window_layers_need_constant_memory(make_model):
    sizes = state_bytes(make_model(layer_types=RECURRENT, window=5), 20)
    assert len(set(sizes[5:])) == 1


def test_attention_keeps_one_row_a_token(make_model):
    model = make_model(layer_types="attention", num_kv_heads=1)
    sizes = state_bytes(model, 12)
    growth = {second - first for first, second in itertools.pairwise(sizes)}
    head_dim, layers, floats, valid = 16, 4, 4, 1
    assert growth == {layers * (2 * head_dim * floats + valid)}


def test_finished_rows_cost_no_steps(make_model, monkeypatch):
    model = make_model()
    full = model.generate([[1], [2]], max_new_tokens=8, seed=0)
    rows = []
    hidden = model.hidden
    monkeypatch.setattr(
        model, "hidden", lambda tokens, *a, **k: rows.append(len(tokens)) or hidden(tokens, *a, **k)
    )
    got = model.generate([[1], [2]], max_new_tokens=8, seed=0, stop=[full[0][2]])
    assert len(got[0]) == 3
    assert rows == [2, 2, 2] + [1] * (len(got[1]) - 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be an integer of 0 or more, got -1"),
        ({"temperature": -1}, "temperature must be a finite number of 0 or more, got -1"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": "warm"}, "temperature must be a finite number of 0 or more, got warm"),
        ({"top_k": 0}, "top_k must be an integer of 1 or more, got 0"),
        ({"top_p": 0}, r"top_p must lie in \(0, 1\], got 0"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\], got 1.5"),
        ({"seed": -1}, "seed must be an integer of 0 or more, got -1"),
        ({"seed": 2**64}, "seed must be below"),
        ({"stop": [[]]}, "stop holds an empty sequence"),
        ({"stop": [257]}, r"stop must hold tokens in \[0, 257\), got 257"),
        ({"stop": 3}, "stop must be a list of tokens or of token sequences, got 3"),
        ({"stop": ["\n"]}, "stop must hold tokens or sequences of tokens"),
        ({"prompts": "text"}, "prompts must be a list of token lists, got text"),
        ({"prompts": ["text"]}, r"prompts must be .*, got text: .*bytes.encode\(text\)"),
        ({"prompts": [1, 2]}, r"prompts\[0\] must be a list of tokens, got 1"),
        ({"prompts": [[1], [257]]}, r"prompts\[1\] must hold tokens in \[0, 257\), got 257"),
        ({"prompts": [torch.zeros(2)]}, r"prompts\[0\] must be integers \[T\]"),
    ],
)
def test_bad_arguments_are_named(changes, message, make_model):
    arguments = {"prompts": [[1]], "max_new_tokens": 2} | changes
    with pytest.raises(ValueError, match=message):
        make_model().generate(**arguments)


def test_errors_of_a_stream_come_before_its_first_token(make_model):
    with pytest.raises(ValueError, match="top_k"):
        make_model().stream([1], max_new_tokens=2, top_k=0)


def test_an_empty_prompt_needs_begin_and_no_state(make_model):
    with pytest.raises(ValueError, match=r"prompts\[1\] is empty: only a model of byte tokens"):
        make_model(vocab_size=50).generate([[1], []], max_new_tokens=1)
    model = make_model()
    with pytest.raises(ValueError, match=r"prompts\[0\] is empty: after a given state"):
        model.generate([[]], max_new_tokens=1, state=model.init_state(1))


def test_a_state_of_other_rows_is_refused(make_model):
    model = make_model()
    with pytest.raises(ValueError, match=r"state must hold 3 rows, one a sequence, got \[2\]"):
        model.generate([[1]] * 3, max_new_tokens=1, state=model.init_state(2))
