"""States: saved, refused, selected, moved, of as many numbers as is said."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from safetensors.torch import save_file

import deltarule.nn.state
from deltarule.nn import MIXERS, ModelState, State, load_state, save_state
from nn.layers import ATTENTION, NAMES, inputs, make

LETTERS = {
    "H": "num_heads", "HV": "num_v_heads", "K": "head_k_dim", "V": "head_v_dim",
    "M": "num_slots", "L": "filter_size", "W": "window",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_saved_state_continues_bitwise(name, tmp_path):
    layer, x = make(name), inputs(2, 6)
    _, state = layer(x)
    save_state(state, tmp_path / "state.safetensors")
    torch.save(state, tmp_path / "state.pt")
    again = load_state(tmp_path / "state.safetensors"), torch.load(tmp_path / "state.pt")
    for other in (*again, copy.deepcopy(state)):
        assert type(other) is State
        assert other.keys() == state.keys()
        assert torch.equal(layer(x, other)[0], layer(x, state)[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_state_has_as_many_numbers_as_is_said(name):
    """After more tokens than a window or a filter has."""
    layer, tokens = make(name), 40
    _, state = layer(inputs(1, tokens))
    held = {x: y.numel() for x, y in state.items() if not x.endswith("conv")}
    for count in {"shift", "length", "position", "valid"} & held.keys():
        held.pop(count)
    letters = {"T": tokens} | {x: getattr(layer, LETTERS[x], None) for x in LETTERS}
    if name in ATTENTION:
        letters |= {"H": layer.num_kv_heads, "K": layer.head_dim, "V": layer.head_dim}
    # "2K (K + V)" is 2 * K * (K + V).
    product = re.sub(r"(?<=\d)(?=[A-Z])|(?<=[\w)]) (?=[\w(])", "*", layer.rule.state_size)
    assert sum(held.values()) == eval(product, letters)


@pytest.mark.parametrize("name", sorted({*NAMES} - {*ATTENTION}))
def test_the_letters_of_a_state_stand_where_options_are_described(name):
    _, _, text = MIXERS[name].__doc__.partition("State: ")
    size, _, text = text.partition(" numbers for each sequence")
    options, _, _ = text.partition("Examples:")
    for letter in re.findall("[A-Z]+", size):
        assert re.search(rf"    \w+: .*\b{letter}\b", options), letter


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_size_is_refused_by_name(name):
    layer = make(name)
    for size in (-1, 1.0, True):
        with pytest.raises(ValueError, match=f"batch_size must be an integer .*, got {size}"):
            layer.init_state(size)
    assert {len(tensor) for tensor in layer.init_state(0).values()} == {0}


@pytest.mark.parametrize("name", ["attention", "rwkv4"])
def test_a_layer_is_exported_for_any_batch_size(name):
    layer = make(name)
    rows = {"x": {0: torch.export.Dim("rows", min=2)}, "state": None}
    exported = torch.export.export(
        layer, (inputs(3, 6),), {"state": None}, dynamic_shapes=rows, strict=False
    ).module()
    x = inputs(5, 6)
    assert torch.equal(exported(x, state=None)[0], layer(x)[0])


def test_model_state_round_trip_keeps_empty_layers_and_order(tmp_path):
    layers = [State(a=torch.full((1, 2), float(i))) for i in range(11)]
    state = ModelState([*layers, State()])
    save_state(state, tmp_path / "state")
    assert list(tmp_path.iterdir()) == [tmp_path / "state"]
    torch.save(state, tmp_path / "state.pt")
    for loaded in (load_state(tmp_path / "state"), torch.load(tmp_path / "state.pt")):
        assert isinstance(loaded, ModelState)
        assert len(loaded) == 12
        assert loaded[11] == {}
        assert [layer["a"][0, 0].item() for layer in loaded[:11]] == list(range(11))


def test_views_of_one_tensor_are_saved_apart(tmp_path):
    whole = torch.arange(6.0).view(2, 3)
    save_state(State(a=whole[:, 1:], b=whole.mT.mT), tmp_path / "state")
    loaded = load_state(tmp_path / "state")
    assert loaded["a"].tolist() == [[1, 2], [4, 5]]
    assert loaded["b"].tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("described", "says"),
    [
        ('{"kind": "ModelState", "layers": 1000000000}', "1000000000 layers"),
        ('{"kind": "ModelState", "layers": -1}', "-1 layers"),
        ('{"kind": "ModelState", "layers": 1e9}', "layers: expected an integer, got float"),
        ('{"kind": "ModelState", "layers": true}', "layers: expected an integer, got bool"),
        ('{"kind": "os.system", "layers": 1}', "kind: expected"),
        ('{"kind": "State", "layers": 1, "flux": 0}', "unknown field 'flux'"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "expected a JSON object, got list"),
    ],
)
def test_a_file_cannot_choose_its_allocation(described, says, tmp_path):
    save_file({"0.a": torch.zeros(1)}, tmp_path / "x", {"deltarule_state": described})
    with pytest.raises(ValueError, match="written by save_state") as caught:
        load_state(tmp_path / "x")
    assert says in str(caught.value)


def test_a_save_that_fails_leaves_the_old_state(tmp_path, monkeypatch):
    path = tmp_path / "state"
    save_state(State(a=torch.zeros(1)), path)

    def half(tensors, file, *_):
        Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(deltarule.nn.state, "save_file", half)
    with pytest.raises(KeyboardInterrupt):
        save_state(State(a=torch.ones(1)), path)
    assert load_state(path)["a"].tolist() == [0]
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_state_is_refused(tmp_path):
    save_state(State(a=torch.zeros(100)), tmp_path / "state")
    short = (tmp_path / "state").read_bytes()[:-1]
    contents = {"empty": b"", "pickle": b"\x80\x04]\x94.", "noise": b"\xff" * 100, "short": short}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    one_layer = {"deltarule_state": '{"kind": "State", "layers": 1}'}
    save_file({"a": torch.zeros(1)}, tmp_path / "weights")
    save_file({"7.a": torch.zeros(1)}, tmp_path / "index", metadata=one_layer)
    for name in (*contents, "weights", "index", "missing"):
        with pytest.raises(ValueError, match=f"path must be a state written by save_state.*{name}"):
            load_state(tmp_path / name)
    with pytest.raises(ValueError, match="weights: it holds other tensors"):
        load_state(tmp_path / "weights")


def test_select_takes_slices_indices_and_flags():
    state = ModelState([State(a=torch.arange(4))])
    for rows, expected in (
        (slice(1, 3), [1, 2]),
        ([3, 3, 0], [3, 3, 0]),
        (torch.tensor([2]), [2]),
        ([], []),
        (np.array([3, 1]), [3, 1]),
        ([True, False, False, True], [0, 3]),
        (torch.tensor([True, False, False, True]), [0, 3]),
    ):
        assert state.select(rows)[0]["a"].tolist() == expected
    part = state.select(slice(0, 2))
    part[0]["a"].zero_()
    assert state[0]["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "rows", [1, None, [0.5], torch.tensor(1), [[0, 1]], torch.zeros(2)], ids=repr
)
def test_what_picks_no_rows_is_refused(rows):
    """One number would take the axis of sequences away."""
    with pytest.raises(
        ValueError, match=r"rows must be a slice, integers \[M\] or bools \[N\], got"
    ):
        State(a=torch.arange(4)).select(rows)


def test_flags_are_as_many_as_the_sequences():
    for flags in ([True], torch.zeros(0, dtype=torch.bool)):
        with pytest.raises(IndexError, match="mask"):
            State(a=torch.arange(4)).select(flags)


@pytest.mark.parametrize("given", [None, {}, (State(),)], ids=repr)
def test_only_states_are_saved(given, tmp_path):
    with pytest.raises(ValueError, match="state must be a State or a ModelState, got"):
        save_state(given, tmp_path / "state")


def test_map_clone_and_bytes():
    state = ModelState([State(a=torch.ones(2, 3), b=torch.ones(2, dtype=torch.bool))])
    assert state.num_bytes == 2 * 3 * 4 + 2
    copy = state.clone()
    copy[0]["a"].zero_()
    assert state[0]["a"].sum() == 6
    assert state.map(lambda t: t.double())[0]["a"].dtype == torch.float64
    assert state.to("meta")[0]["b"].device.type == "meta"


def test_a_deep_copy_is_outside_the_graph_and_keeps_what_is_learned():
    first = torch.ones(1, requires_grad=True)
    copied = copy.deepcopy(ModelState([State(a=first, b=2 * first)]))[0]
    assert copied["a"].is_leaf
    assert copied["a"].requires_grad
    assert copied["a"] is not first
    assert not copied["b"].requires_grad


def test_states_are_trees_that_do_not_know_the_order_of_their_tensors():
    one = State(a=torch.zeros(1), b=torch.ones(1))
    other = State(b=torch.ones(1), a=torch.zeros(1))
    total = pytree.tree_map(torch.add, ModelState([one, State()]), ModelState([other, State()]))
    assert isinstance(total, ModelState)
    assert isinstance(total[0], State)
    assert {name: tensor.item() for name, tensor in total[0].items()} == {"a": 0, "b": 2}
    assert total[1] == {}
