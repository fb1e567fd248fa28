import io
import json
import math
import os
import pickle
import shutil
import stat
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from deltarule.models import CausalLM, CheckpointError
from deltarule.models.config import RENAMED
from deltarule.models.files import CONFIG, INDEX, WEIGHTS
from models.checkpoints import refuses, same_tensors
from train.test_checkpoint import Trap


@pytest.fixture
def saved(make_model, tmp_path):
    """A folder with a saved model."""
    make_model(tie_embeddings=False).save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_comes_back_bit_for_bit(dtype, make_model, random_tokens, tmp_path):
    model = make_model().to(dtype)
    model.save(tmp_path / "a" / "b")
    before = torch.get_rng_state()
    again = CausalLM.load(tmp_path / "a" / "b")
    assert torch.equal(torch.get_rng_state(), before)
    assert again.config == model.config
    same_tensors(again.state_dict(), model.state_dict())
    logits = model(tokens := random_tokens(1, 9))[0]
    assert logits.dtype == dtype
    assert torch.equal(again(tokens)[0], logits)
    for name, parameter in model.named_parameters():
        assert again.get_parameter(name).requires_grad
        assert vars(again.get_parameter(name)) == vars(parameter), name
    assert not any(t.is_meta for t in [*again.parameters(), *again.buffers()])


def test_a_parameter_without_elements_is_saved(make_model, random_tokens, tmp_path):
    model = make_model(layer_types="titans_mag", num_persistent=0)
    model.save(tmp_path)
    tokens = random_tokens(1, 9)
    assert torch.equal(CausalLM.load(tmp_path)(tokens)[0], model(tokens)[0])


def test_a_loaded_model_does_not_follow_its_file(saved, random_tokens):
    model = CausalLM.load(saved)
    tokens = random_tokens(1, 5)
    before = model(tokens)[0]
    weights = saved / WEIGHTS
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size // 2)
        file.write(bytes(weights.stat().st_size // 2))
    assert torch.equal(model(tokens)[0], before)


def test_other_tools_can_read_the_files(saved):
    assert json.loads((saved / CONFIG).read_text())["hidden_size"] == 32
    with safe_open(saved / WEIGHTS, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    mode = os.umask(0)
    os.umask(mode)
    for name in (WEIGHTS, CONFIG):
        assert stat.S_IMODE((saved / name).stat().st_mode) == 0o666 & ~mode
    assert sorted(path.name for path in saved.iterdir()) == [CONFIG, WEIGHTS]


def written(name, content):
    """A folder's file is something else."""
    return lambda folder: (folder / name).write_bytes(content)


def fields(**changes):
    """config.json asks for something else."""

    def change(folder):
        stored = json.loads((folder / CONFIG).read_text())
        asked = {RENAMED.get(name, name): value for name, value in changes.items()}
        (folder / CONFIG).write_text(json.dumps(stored | asked))

    return change


def raw(change):
    """The bytes of the weights, changed."""
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def tensors(change):
    """Other tensors are stored."""

    def damage(folder):
        stored = load_file(folder / WEIGHTS)
        change(stored)
        save_file(stored, folder / WEIGHTS)

    return damage


CUT = "truncated or malformed"
# By a title: what is done to a folder, and what its refusal says, beside the folder.
DAMAGE = {
    "config truncated": (written(CONFIG, b'{"vocab_size": 2'), CONFIG, "not JSON"),
    "config not text": (written(CONFIG, b"\xff\xfe\x00"), CONFIG, "not UTF-8 text"),
    "unknown key": (fields(hiden_size=3), CONFIG, "did you mean 'hidden_size'"),
    "missing key": (written(CONFIG, b'{"layer_types": "kda"}'), CONFIG, "missing key"),
    "no model_type": (written(CONFIG, b'{"d_model": 3}'), CONFIG, "no model_type: not a"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), CONFIG),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), WEIGHTS),
    "too many layers": (fields(num_layers=10**9, layer_types=["kda"]), "must be at most"),
    "many layers": (fields(num_layers=4000), "num_layers=4000, but only"),
    "huge vocabulary": (fields(vocab_size=10**18), CONFIG),
    "huge stream": (fields(hidden_size=10**18), CONFIG),
    "huge MLP": (fields(mlp_size=10**18), CONFIG),
    "wider": (fields(hidden_size=64), "has shape"),
    "deeper": (fields(num_layers=8), "missing 'blocks."),
    "tied": (fields(tie_embeddings=True), "unexpected 'head.weight'"),
    "unknown layer": (fields(layer_types=["kda_"]), "did you mean 'kda'"),
    "no number": (fields(rope_theta=math.nan), "rope_theta must be a finite number"),
    **{
        f"{length} bytes": (raw(lambda content, n=length: content[:n]), WEIGHTS, CUT)
        for length in (0, 3, 8, 9, 100, 3000, -1, -4000)
    },
    "Git LFS": (raw(lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0"),
                WEIGHTS, "a Git LFS pointer, not the file: git lfs pull"),
    "bytes after the end": (raw(lambda content: content + b"more"), WEIGHTS, CUT),
    "missing tensor": (tensors(lambda t: t.pop("norm.weight")), "missing 'norm.weight'"),
    "unexpected tensor": (
        tensors(lambda t: t.update(other=torch.zeros(2))), "unexpected 'other'"
    ),
    "reshaped tensor": (
        tensors(lambda t: t.update({"norm.weight": torch.zeros(32, 1)})),
        "tensor 'norm.weight' has shape [32, 1]",
    ),
    "integers": (
        tensors(lambda t: t.update({"norm.weight": torch.zeros(32, dtype=torch.int32)})),
        "tensor 'norm.weight' is I32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("title", DAMAGE)
def test_damage_is_refused_and_named(title, saved):
    change, *messages = DAMAGE[title]
    change(saved)
    refuses(saved, str(saved), *messages)


def test_a_folder_with_the_fields_own_names(saved):
    """As it was written before transformers' names were."""
    fields = json.loads((saved / CONFIG).read_text())
    assert fields.pop("model_type") == "deltarule"
    del fields["architectures"]
    for ours, theirs in RENAMED.items():
        fields[ours] = fields.pop(theirs)
    expected = CausalLM.load(saved).config
    (saved / CONFIG).write_text(json.dumps(fields))
    assert CausalLM.load(saved).config == expected
    (saved / CONFIG).write_text(json.dumps(fields | {"num_hidden_layers": 4}))
    refuses(saved, "'num_layers' and 'num_hidden_layers' are one option")
    (saved / CONFIG).write_text(json.dumps(fields | {"model_type": "llama"}))
    refuses(saved, "model_type must be one of deltarule, delta_net, ", "jamba, got 'llama'")


def test_names_with_the_prefix_of_transformers(saved):
    tensors = load_file(saved / WEIGHTS)
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    expected = CausalLM.load(saved).state_dict()
    save_file(prefixed, saved / WEIGHTS)
    same_tensors(CausalLM.load(saved).state_dict(), expected)
    save_file(prefixed | {"norm.weight": tensors["norm.weight"].clone()}, saved / WEIGHTS)
    refuses(saved, "'norm.weight' is stored twice")


@pytest.mark.parametrize("device", ["cuda:99", "gpu", torch.device("cuda", 99)], ids=str)
def test_a_device_that_is_not_there_is_named(device, saved):
    with pytest.raises(ValueError, match=f"device {device} is not available here: ") as caught:
        CausalLM.load(saved, device=device)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_and_a_file_in_its_place(tmp_path, saved):
    refuses(tmp_path / "org" / "model", "org/model: no folder here; names on a hub are not")
    refuses(saved / WEIGHTS, f"{WEIGHTS}: a file; give its folder")
    with pytest.raises(CheckpointError, match="is a file: a model is saved as a folder"):
        CausalLM.load(saved).save(saved / WEIGHTS)


def zipped(payload):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", payload)
    return buffer.getvalue()


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("in_zip", [False, True])
@pytest.mark.parametrize("name", [WEIGHTS, "pytorch_model.bin", "model.pt", CONFIG, INDEX])
def test_a_pickle_is_never_opened(protocol, in_zip, name, saved, tmp_path):
    marker = tmp_path / "exploded"
    payload = pickle.dumps(Trap(marker), protocol=protocol)
    if name != CONFIG:
        (saved / WEIGHTS).unlink()
    (saved / name).write_bytes(zipped(payload) if in_zip else payload)
    refuses(saved, name)
    assert not marker.exists()
    pickle.loads(payload)
    assert marker.exists(), "the pickle of this test must be able to do harm"


def test_a_pickle_is_called_one(saved, tmp_path):
    torch.save({"a": torch.zeros(2)}, saved / WEIGHTS)
    refuses(saved, WEIGHTS, "is a pickle or a zip of one")
    (saved / WEIGHTS).rename(saved / "pytorch_model.bin")
    refuses(saved, "pytorch_model.bin", "looks like a pickle")


@pytest.fixture
def sharded(saved):
    """The saved model as two shards and an index."""
    tensors = load_file(saved / WEIGHTS)
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == shard}, saved / shard)
    (saved / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(saved / WEIGHTS, saved.parent / "whole.safetensors")
    (saved / WEIGHTS).unlink()
    return saved


def test_shards_are_put_together_and_links_inside_the_folder_and_to_it_followed(sharded):
    (sharded / "part-0.safetensors").rename(sharded / "data")
    (sharded / "part-0.safetensors").symlink_to("data")
    (sharded.parent / "link").symlink_to(sharded)
    whole = load_file(sharded.parent / "whole.safetensors")
    same_tensors(CausalLM.load(sharded.parent / "link").state_dict(), whole)


@pytest.mark.parametrize(
    "shard",
    ["../whole.safetensors", "/etc/whole.safetensors", "sub/x.safetensors", "..\\x.safetensors",
     "C:x.safetensors", "a\0.safetensors", "../", "part-0.bin", "", 3, None, "gone.safetensors"],
)  # fmt: skip
def test_shard_names_that_lead_elsewhere(shard, sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["norm.weight"] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    refuses(sharded, str(sharded))


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, INDEX, "part-0.safetensors"])
def test_links_out_of_the_folder(name, sharded):
    outside = sharded.parent / f"outside-{name}"
    if name == WEIGHTS:
        (sharded.parent / "whole.safetensors").rename(outside)
    else:
        (sharded / name).rename(outside)
    (sharded / name).symlink_to(outside)
    refuses(sharded, name, "link that leads out of the folder")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name)])
def test_what_is_no_regular_file(make, sharded):
    (sharded / "part-0.safetensors").unlink()
    make(sharded / "part-0.safetensors")
    refuses(sharded, "part-0.safetensors: ")


def test_an_index_that_does_not_describe_its_shards(sharded):
    index = json.loads((sharded / INDEX).read_text())
    for content, message in {
        "{}": "weight_map: expected a JSON object, got NoneType",
        '{"weight_map": []}': "weight_map: expected a JSON object, got list",
        '{"weight_map": {}}': "weight_map names no tensor",
        '{"weight_map": {"norm.weight": 1}}': "weight_map.norm.weight: expected a string",
        "[" * 100_000: "nested too deeply",
        "nonsense": "not JSON: Expecting value",
    }.items():
        (sharded / INDEX).write_text(content)
        refuses(sharded, INDEX, message)
    del index["weight_map"]["norm.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    refuses(sharded, "unexpected 'norm.weight'")
