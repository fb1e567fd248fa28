import ast
import io
import json
import os
import pickle
import random
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import deltarule
from deltarule.models import CausalLM, CheckpointError
from deltarule.models.config_names import RENAMED
from deltarule.models.files import CONFIG, INDEX, WEIGHTS


@pytest.fixture
def saved(make_model, tmp_path):
    """A folder with a saved model."""
    make_model(tie_embeddings=False).save(tmp_path / "model")
    return tmp_path / "model"


def header_of(path):
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_header(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def refuses(folder, *messages):
    with pytest.raises(CheckpointError) as caught:
        CausalLM.load(folder)
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_comes_back_bit_for_bit(dtype, make_model, random_tokens, tmp_path):
    model = make_model().to(dtype)
    model.save(tmp_path / "a" / "b")
    again = CausalLM.load(tmp_path / "a" / "b")
    assert again.config == model.config
    assert [*again.state_dict()] == [*model.state_dict()]
    for name, tensor in model.state_dict().items():
        assert again.state_dict()[name].dtype == tensor.dtype, name
        assert torch.equal(again.state_dict()[name], tensor), name
    tokens = random_tokens(1, 9)
    assert torch.equal(again(tokens)[0], model(tokens)[0])
    for name, parameter in model.named_parameters():
        assert again.get_parameter(name).requires_grad
        assert vars(again.get_parameter(name)) == vars(parameter), name
    assert not any(t.is_meta for t in [*again.parameters(), *again.buffers()])


def test_loading_leaves_the_global_random_state_alone(saved):
    before = torch.get_rng_state()
    CausalLM.load(saved)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("layer_types", ["deltanet", "gated_deltanet", "kda"])
def test_a_model_is_loaded_and_continues_text_without_the_compiler(
    layer_types, make_model, tmp_path
):
    make_model(layer_types=layer_types).save(tmp_path)
    code = f"""
import sys
from deltarule.models import CausalLM
before = set(sys.modules)
CausalLM.load({str(tmp_path)!r}).generate([[1, 2]], max_new_tokens=2)
print(sorted({{"torch._dynamo", "torch._inductor", "sympy"}} & (set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


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
    header, _ = header_of(saved / WEIGHTS)
    assert header["__metadata__"] == {"format": "pt"}
    mode = os.umask(0)
    os.umask(mode)
    for name in (WEIGHTS, CONFIG):
        assert stat.S_IMODE((saved / name).stat().st_mode) == 0o666 & ~mode
    assert sorted(path.name for path in saved.iterdir()) == [CONFIG, WEIGHTS]


MALFORMED_CONFIGS = {
    "empty": (b"", "not JSON"),
    "truncated": (b'{"vocab_size": 2', "not JSON"),
    "not an object": (b"[]", "expected a JSON object"),
    "not text": (b"\xff\xfe\x00", "not UTF-8 text"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "unknown key": (b'{"hiden_size": 3}', "did you mean 'hidden_size'"),
    "missing key": (b'{"vocab_size": 3}', "missing key"),
}


@pytest.mark.parametrize("name", MALFORMED_CONFIGS)
def test_a_malformed_config_is_named(name, saved):
    content, message = MALFORMED_CONFIGS[name]
    (saved / CONFIG).write_bytes(content)
    refuses(saved, CONFIG, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 10**9, "layer_types": ["kda"]}, "num_layers must be at most"),
        ({"num_layers": 4000, "layer_types": ["kda"]}, "num_layers=4000, but only"),
        ({"vocab_size": 10**18}, CONFIG),
        ({"hidden_size": 10**18}, CONFIG),
        ({"mlp_size": 10**18}, CONFIG),
        ({"hidden_size": 64}, "has shape"),
        ({"num_layers": 8, "layer_types": ["gated_deltanet"]}, "missing 'blocks."),
        ({"tie_embeddings": True}, "unexpected 'head.weight'"),
        ({"layer_types": ["kda_"]}, "did you mean 'kda'"),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number"),
    ],
)
def test_a_config_that_does_not_fit_the_tensors(changes, message, saved):
    fields = json.loads((saved / CONFIG).read_text())
    changes = {RENAMED.get(name, name): value for name, value in changes.items()}
    (saved / CONFIG).write_text(json.dumps(fields | changes))
    refuses(saved, str(saved), message)


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
    refuses(saved, "model_type 'llama' is of no family")


def test_names_with_the_prefix_of_transformers(saved):
    tensors = load_file(saved / WEIGHTS)
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    expected = CausalLM.load(saved).state_dict()
    save_file(prefixed, saved / WEIGHTS)
    read = CausalLM.load(saved).state_dict()
    assert all(torch.equal(read[name], expected[name]) for name in expected)
    save_file(prefixed | {"norm.weight": tensors["norm.weight"].clone()}, saved / WEIGHTS)
    refuses(saved, "'norm.weight' is stored twice")


@pytest.mark.parametrize("missing", [CONFIG, WEIGHTS])
def test_a_missing_file_is_named(missing, saved):
    (saved / missing).unlink()
    refuses(saved, str(saved), missing)


def test_a_missing_folder_and_a_file_in_its_place(tmp_path, saved):
    refuses(tmp_path / "nowhere", "nowhere")
    refuses(saved / WEIGHTS, WEIGHTS)


@pytest.mark.parametrize("length", [0, 3, 8, 9, 100, 3000, -1, -4000])
def test_truncated_weights(length, saved):
    weights = saved / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:length])
    refuses(saved, WEIGHTS, "truncated or malformed")


def test_bytes_after_the_end(saved):
    with (saved / WEIGHTS).open("ab") as file:
        file.write(b"more")
    refuses(saved, WEIGHTS, "truncated or malformed")


@pytest.mark.parametrize("length", [2**63, 2**40, 10**7])
def test_a_huge_header_allocates_nothing(length, saved):
    weights = saved / WEIGHTS
    weights.write_bytes(length.to_bytes(8, "little") + weights.read_bytes()[8:])
    refuses(saved, WEIGHTS, f"header of {length} bytes")


def test_a_header_longer_than_the_format_allows(saved):
    length = 10**8 + 1
    (saved / WEIGHTS).write_bytes(length.to_bytes(8, "little") + b"{")
    # A hole: these bytes take no space on the disk.
    os.truncate(saved / WEIGHTS, 2 * length)
    refuses(saved, WEIGHTS, f"header of {length} bytes")


def damage(header, kind):
    first, second = sorted(name for name in header if name != "__metadata__")[:2]
    if kind == "overlap":
        header[second]["data_offsets"] = header[first]["data_offsets"]
        header[second]["shape"] = header[first]["shape"]
    elif kind == "beyond the end":
        header[first]["data_offsets"] = [10**12, 10**12 + 4]
    elif kind == "negative":
        header[first]["shape"][0] *= -1
    elif kind == "overflow":
        header[first]["shape"] = [2**62, 2**62]
    elif kind == "wrong shape":
        header[first]["shape"] = [*header[first]["shape"], 2]
    elif kind == "unknown dtype":
        header[first]["dtype"] = "F99"
    elif kind == "no offsets":
        del header[first]["data_offsets"]
    return header


@pytest.mark.parametrize(
    "kind",
    ["overlap", "beyond the end", "negative", "overflow", "wrong shape", "unknown dtype",
     "no offsets"],
)  # fmt: skip
def test_a_damaged_header(kind, saved):
    header, data = header_of(saved / WEIGHTS)
    write_header(saved / WEIGHTS, damage(header, kind), data)
    refuses(saved, WEIGHTS, "truncated or malformed")


@pytest.mark.parametrize("header", [b"{", b"[]", b"null", b"\xff\xff\xff", b'{"a": 3}', b"{}"])
def test_a_header_that_is_none(header, saved):
    write_header(saved / WEIGHTS, header, b"")
    refuses(saved, str(saved))


def rewrite(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_tensors_missing_unexpected_reshaped_or_of_integers(saved):
    original = (saved / WEIGHTS).read_bytes()
    changes = {
        "missing 'norm.weight'": lambda t: t.pop("norm.weight"),
        "unexpected 'other'": lambda t: t.update(other=torch.zeros(2)),
        "tensor 'norm.weight' has shape [32, 1]": lambda t: t.update(
            {"norm.weight": torch.zeros(32, 1)}
        ),
        "tensor 'norm.weight' is I32": lambda t: t.update(
            {"norm.weight": torch.zeros(32, dtype=torch.int32)}
        ),
    }
    for message, change in changes.items():
        (saved / WEIGHTS).write_bytes(original)
        rewrite(saved, change)
        refuses(saved, str(saved), message)


class Bomb:
    """A pickle that leaves a file behind when it is read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


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
    payload = pickle.dumps(Bomb(marker), protocol=protocol)
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


def test_no_source_file_can_unpickle():
    for path in Path(deltarule.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names] + [getattr(node, "module", None)]
                assert not {"pickle", "dill", "joblib", "shelve", "marshal"} & {*modules}, path
            if isinstance(node, ast.Attribute) and node.attr == "load":
                assert ast.unparse(node) != "torch.load", path


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


def test_shards_are_put_together(sharded):
    whole = load_file(sharded.parent / "whole.safetensors")
    for name, tensor in CausalLM.load(sharded).state_dict().items():
        assert torch.equal(tensor, whole[name])


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


def test_links_inside_the_folder_and_to_it(sharded):
    (sharded / "part-0.safetensors").rename(sharded / "data")
    (sharded / "part-0.safetensors").symlink_to("data")
    (sharded.parent / "link").symlink_to(sharded)
    CausalLM.load(sharded.parent / "link")


def test_what_is_no_regular_file(sharded):
    (sharded / "part-0.safetensors").unlink()
    (sharded / "part-0.safetensors").mkdir()
    refuses(sharded, "part-0.safetensors", "not a regular file")
    (sharded / "part-0.safetensors").rmdir()
    os.mkfifo(sharded / "part-0.safetensors")
    refuses(sharded, "part-0.safetensors", "not a regular file")
    (sharded / "part-0.safetensors").unlink()
    (sharded / "part-0.safetensors").symlink_to("part-0.safetensors")
    refuses(sharded, "part-0.safetensors")


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


def test_random_damage_is_refused_or_harmless(saved):
    """Any change of the header loads the same tensors or is refused; nothing else is raised."""
    original = (saved / WEIGHTS).read_bytes()
    header = int.from_bytes(original[:8], "little")
    dice = random.Random(0)
    refused = 0
    for _ in range(150):
        raw = bytearray(original)
        for _ in range(dice.choice([1, 1, 2, 8])):
            raw[dice.randrange(8 + header)] = dice.randrange(256)
        (saved / WEIGHTS).write_bytes(raw)
        refusal = ""
        try:
            CausalLM.load(saved)
        except CheckpointError as error:
            refusal = str(error)
            refused += 1
        assert not refusal or str(saved) in refusal
    assert refused > 75
