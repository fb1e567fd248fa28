import itertools

import numpy as np
import pytest
import torch

from deltarule.models.bytes import BEGIN
from models.checkpoints import same_states

RECURRENT = ("gated_deltanet", "sliding_window", "rwkv7", "mamba2")


def greedy_without_cache(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        logits, _ = model(torch.tensor([tokens]))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_rows_do_not_depend_on_their_neighbours(make_model, random_tokens):
    model = make_model()
    prompts = [random_tokens(n, seed=n).tolist() for n in (9, 1, 4, 16)] + [[]]
    together = model.generate(prompts, max_new_tokens=12, temperature=0)
    for prompt, row in zip(prompts, together, strict=True):
        assert row == greedy_without_cache(model, prompt or [BEGIN], 12)
    together = model.generate(prompts, max_new_tokens=15, seed=40)
    for row, prompt in enumerate(prompts):
        assert model.generate([prompt], max_new_tokens=15, seed=40 + row) == [together[row]]


def test_another_default_device_changes_no_token(make_model):
    model, prompts = make_model(), [[1, 2, 1, 2], [3]]
    for option in ({"repetition_penalty": 1.1}, {"draft": 2}):
        given = {"max_new_tokens": 9, "seed": 1, **option}
        expected = model.generate(prompts, **given)
        with torch.device("meta"):
            assert model.generate(prompts, **given) == expected


def test_the_seed_decides_and_the_global_random_state_is_left_alone(make_model):
    model, before = make_model(), torch.get_rng_state()
    rows = [model.generate([[1], [1]], max_new_tokens=15, seed=seed) for seed in (3, 3, 4)]
    assert rows[0] == rows[1] != rows[2]
    assert rows[0][0] != rows[0][1]
    fresh = [list(model.stream([1], max_new_tokens=15)) for _ in range(2)]
    assert fresh[0] != fresh[1]
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


@pytest.mark.parametrize("way", [{"cuda_graphs": False}, {}, {"draft": 3}], ids=str)
def test_a_stop_token_ends_its_row_only(way, device, make_model, random_tokens, on_buffers):
    """In a graph it is seen a step late, and a guess may be beyond it."""
    model = make_model().to(device)
    prompts = [random_tokens(4, seed=seed).tolist() for seed in range(3)]
    options = {"max_new_tokens": 70, "seed": 0, **way}
    full = model.generate(prompts, **options)
    stop = full[1][5]
    got = model.generate(prompts, stop=[stop], **options)
    for row, expected in zip(got, full, strict=True):
        assert row == expected[: expected.index(stop) + 1 if stop in expected else 70]
    assert len(got[1]) <= 6


def test_integers_of_any_library_and_lists_read_once(make_model):
    """Stops and prompts as NumPy and PyTorch give them, and as they come one by one."""
    model = make_model()
    full = model.generate([[1, 2], [3]], max_new_tokens=8, seed=0)
    stop, rows = full[0][2], (np.array([1, 2]), (np.int64(3),))
    expected = model.generate([[1, 2], [3]], max_new_tokens=8, seed=0, stop=[stop])
    assert expected != full
    for stops in ([np.int64(stop)], np.array([stop]), torch.tensor([stop]), iter([stop])):
        found = model.generate(iter(rows), max_new_tokens=8, seed=0, stop=stops)
        assert found == expected, stops


def test_numbers_of_numpy_draw_as_those_of_python(make_model):
    model = make_model()
    share, options = np.float32(0.75), {"max_new_tokens": 8, "seed": 0}
    names = "temperature", "top_p", "min_p", "repetition_penalty"
    counts = {"top_k": 3, "max_new_tokens": 5, "seed": 7, "draft": 2}
    given = [{name: share} for name in names] + [{k: np.int64(n)} for k, n in counts.items()]
    for one in given:
        expected = {name: value.item() for name, value in one.items()}
        found = model.generate([[1, 2]], **options | one)
        assert found == model.generate([[1, 2]], **options | expected)
        assert found == [[*model.stream([1, 2], **options | one)]]


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


def test_a_stream_gives_what_generate_gives_and_tensors_are_prompts(make_model, random_tokens):
    model, prompt = make_model(), random_tokens(4)
    stream = model.stream(prompt, max_new_tokens=9, seed=2, top_k=50)
    first = list(itertools.islice(stream, 3))
    assert torch.is_grad_enabled()
    rest = list(stream)
    found = model.generate([prompt.tolist()], max_new_tokens=9, seed=2, top_k=50)
    assert [first + rest] == found


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
    same_states(state, before)


@pytest.mark.parametrize(("layer_types", "grown"), {RECURRENT: 0, "attention": 4 * 129}.items())
def test_attention_keeps_one_row_a_token_and_others_none(layer_types, grown, make_model):
    """A key and a value of 16 channels in four bytes, and a byte whether it counts, in 4 layers."""
    model, state, sizes = make_model(layer_types=layer_types, num_kv_heads=1), None, []
    for _ in range(20):
        _, state = model(torch.ones(1, 1, dtype=torch.long), state)
        sizes.append(state.num_bytes)
    assert {second - first for first, second in itertools.pairwise(sizes[5:])} == {grown}


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
        ({"min_p": 0.0}, "min_p must be a number in"),
        ({"min_p": 1.5}, "min_p must be a number in"),
        ({"min_p": "a"}, r"min_p must be a number in \(0, 1\], got 'a'"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a number above 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be a number above 0"),
        ({"repetition_penalty": None}, "repetition_penalty must be a number above 0, got None"),
        ({"repetition_penalty": 2.0, "draft": 3}, "draft must be 0 with a repetition_penalty"),
        ({"draft": -1}, "draft must be an integer of 0 or more"),
        ({"draft": 16}, "draft must be at most 15, got 16"),
        ({"draft": True}, "draft must be an integer of 0 or more"),
        ({"max_new_tokens": -1}, "max_new_tokens must be an integer of 0 or more, got -1"),
        ({"temperature": -1}, "temperature must be a finite number of 0 or more, got -1"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": "warm"}, "temperature must be a finite number of 0 or more, got 'warm'"),
        ({"top_k": 0}, "top_k must be an integer of 1 or more, got 0"),
        ({"top_p": 0}, r"top_p must be a number in \(0, 1\], got 0"),
        ({"top_p": 1.5}, r"top_p must be a number in \(0, 1\], got 1.5"),
        ({"seed": -1}, "seed must be an integer of 0 or more, got -1"),
        ({"seed": 2**64}, "seed must be below"),
        ({"stop": [[]]}, "stop holds an empty sequence"),
        ({"stop": [257]}, r"stop must hold tokens in \[0, 257\), got 257"),
        ({"stop": 3}, "stop must be a list of tokens or of token sequences, got 3"),
        ({"stop": ["\n"]}, "stop must be a list of tokens or of token sequences, got text"),
        ({"stop": [b"\n"]}, r"stop must be .*, got text: deltarule.models.bytes.encode\(text\)"),
        ({"stop": [["\n"]]}, r"stop must be .*, got \[\['"),
        ({"cuda_graphs": "no"}, "cuda_graphs must be True, False or None, got 'no'"),
        ({"state": 3}, "state must hold the states of 4 layers, got int: give what this"),
        ({"state": ({},) * 4}, "state must hold the states of 4 layers, got tuple: give what"),
        ({"prompts": None}, "prompts must be a list of token lists, got NoneType"),
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


def test_streams_empty_prompts_and_states_that_are_refused(make_model):
    model = make_model()
    # Before the first token is asked for.
    with pytest.raises(ValueError, match="top_k"):
        model.stream([1], max_new_tokens=2, top_k=0)
    with pytest.raises(ValueError, match=r"prompts\[1\] is empty: only a model of byte tokens"):
        make_model(vocab_size=50).generate([[1], []], max_new_tokens=1)
    with pytest.raises(ValueError, match=r"prompts\[0\] is empty: after a given state"):
        model.generate([[]], max_new_tokens=1, state=model.init_state(1))
    with pytest.raises(ValueError, match=r"state must hold 3 rows, one a sequence, got \[2\]"):
        model.generate([[1]] * 3, max_new_tokens=1, state=model.init_state(2))
    with pytest.raises(ValueError, match="batch_size must be an integer of 0 or more, got -1"):
        model.init_state(-1)
