"""From one layout to another, tensor by tensor: the same bits, whole or absent."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltarule.lookup import checkpoints
from deltarule.models import FAMILIES, CausalLM, ModelConfig
from deltarule.models.convert.copy import convert
from deltarule.models.convert.layout import check_parts
from deltarule.models.convert.names import Piece, filters
from deltarule.models.files import CONFIG, INDEX, WEIGHTS
from deltarule.nearest import nearest
from deltarule.nn import SYSTEMS
from models.checkpoints import redraw, same_tensors
from most_memory import growth

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "mlp_size": 48}


@pytest.fixture
def saved(tmp_path):
    """A folder with a model in this library's own layout."""
    torch.manual_seed(0)
    redraw(CausalLM(ModelConfig(layer_types="kda", **SMALL))).save(tmp_path / "own")
    return tmp_path / "own"


def same_files(one, other):
    same_tensors(load_file(one / WEIGHTS), load_file(other / WEIGHTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_is_bit_equal(dtype, saved, tmp_path):
    model, tokens = CausalLM.load(saved).to(dtype), torch.arange(61)[None]
    model.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "kda", "kda")
    model.save(tmp_path / "saved", "kda")
    same_files(tmp_path / "saved", tmp_path / "kda")
    convert(tmp_path / "kda", tmp_path / "back")
    same_files(tmp_path / "ours", tmp_path / "back")
    # Written out, the options give the same model.
    assert torch.equal(model(tokens)[0], CausalLM.load(tmp_path / "back")(tokens)[0])


@pytest.mark.parametrize("size", [1, 3000, 20_000])
def test_shards_have_their_index(size, saved, tmp_path):
    convert(saved, tmp_path / "kda", "kda", shard_size=size)
    convert(saved, tmp_path / "whole", "kda")
    weight_map = json.loads((tmp_path / "kda" / INDEX).read_text())["weight_map"]
    for name in set(weight_map.values()):
        tensors = load_file(tmp_path / "kda" / name)
        assert {*tensors} == {tensor for tensor, file in weight_map.items() if file == name}
        assert len(tensors) == 1 or sum(x.numel() * 4 for x in tensors.values()) <= size
    convert(tmp_path / "kda", tmp_path / "again", "kda")
    same_files(tmp_path / "whole", tmp_path / "again")


def test_rows_and_the_page_name_every_family():
    assert {name for row in SYSTEMS.values() for name in checkpoints(row)} == {*FAMILIES}
    page = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "opt", "gemma"])
def test_a_family_of_another_name_is_not_taken_for_a_misspelt_one(name):
    assert nearest(name, FAMILIES) == ""


def test_a_file_may_have_sizes_of_layers_that_the_model_has_none_of():
    stored = {
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "layer_types": ["attention"] * 2, "mamba_n_heads": 2, "mamba_d_head": 32,
        "mamba_n_groups": 2, "num_local_experts": 0, "intermediate_size": 48,
        "shared_intermediate_size": 48,
    }  # fmt: skip
    config = FAMILIES["granitemoehybrid"].config(stored | {"model_type": "granitemoehybrid"})
    assert (config.layer_types, config.n_groups) == (("attention", "attention"), 1)
    assert config.attention_multiplier == 1.0


@pytest.mark.parametrize("family", ["granitemoehybrid", "falcon_h1"])
def test_the_usual_scale_of_attention_is_written_as_a_number(family, tmp_path):
    mixers = ("mamba2", "attention") if family == "granitemoehybrid" else "mamba2+attention"
    options = SMALL | {"num_attention_heads": 4, "head_v_dim": 32, "conv_bias": True}
    turned = {"partial_rotary_factor": float(family == "falcon_h1")}
    model = CausalLM(ModelConfig(layer_types=mixers, **options, **turned))
    model.save(tmp_path / "theirs", family)
    read, tokens = CausalLM.load(tmp_path / "theirs"), torch.arange(61)[None]
    assert read.config.attention_multiplier == 8**-0.5
    assert torch.equal(model(tokens)[0], read(tokens)[0])


def test_a_parameter_without_a_name_is_refused():
    with pytest.raises(ValueError, match="has no name for the parameter 'b'"):
        check_parts([Piece("theirs", ("a",))], {"a": (1,), "b": (1,)})


def test_progress_ends_at_the_total_and_files_of_the_tokenizer_go_along(saved, tmp_path):
    (saved / "tokenizer.json").write_text("{}")
    (saved / "notes.txt").write_text("mine")
    seen = []
    convert(saved, tmp_path / "kda", "kda", progress=lambda *counts: seen.append(counts))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(p.nbytes for p in CausalLM.load(saved).parameters())
    names = sorted(path.name for path in (tmp_path / "kda").iterdir())
    assert names == [CONFIG, WEIGHTS, "tokenizer.json"]


def test_nothing_is_left_of_what_fails(saved, tmp_path):
    before = sorted(path.name for path in tmp_path.iterdir())

    def stop(done, total):
        if done > total // 2:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        convert(saved, tmp_path / "kda", "kda", progress=stop)
    for arguments, message in {
        (saved, saved, "kda"): "exists already",
        (saved, tmp_path / "kda", "gla"): "layer_types \\(",
        (saved, tmp_path / "kda", "gal"): "did you mean 'gla'",
        (tmp_path, tmp_path / "kda", "kda"): CONFIG,
    }.items():
        with pytest.raises(ValueError, match=message):
            convert(*arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_rows_of_several_parts_are_taken_apart_and_put_together():
    shapes = {"a": (4, 3), "b": (2, 3)}
    piece = Piece("ab", ("a", "b"), groups=2)
    tensors = [torch.randn(shape) for shape in shapes.values()]
    whole = piece.write(tensors)
    assert whole.shape == piece.shape(shapes) == (6, 3)
    expected = torch.cat([tensors[0][:2], tensors[1][:1], tensors[0][2:], tensors[1][1:]])
    assert torch.equal(whole, expected)
    found = {}
    piece.read(whole, shapes, found)
    for part, x in zip(found.values(), tensors, strict=True):
        assert torch.equal(part, x)
        assert part.untyped_storage().nbytes() == x.nbytes
    assert Piece("w", ("a",), form=filters).write(tensors[:1]).shape == (4, 1, 3)


def test_tensors_of_no_language_model_are_left_out_with_a_line(tmp_path):
    attention = {"attention_qk_norm": "head", "attention_gate": True, "attention_head_dim": 16}
    config = ModelConfig(
        layer_types=("gated_deltanet", "attention"), head_k_dim=16, head_v_dim=16,
        partial_rotary_factor=0.25, zero_centered_norm=True, **attention, **SMALL,
    )  # fmt: skip
    redraw(CausalLM(config)).save(tmp_path / "whole", "qwen3_5")
    tensors = load_file(tmp_path / "whole" / WEIGHTS)
    tensors |= {"mtp.fc.weight": torch.ones(1), "model.visual.patch_embed.bias": torch.ones(1)}
    shutil.copytree(tmp_path / "whole", tmp_path / "more")
    save_file(tensors, tmp_path / "more" / WEIGHTS)
    with pytest.warns(UserWarning, match=r"2 tensors .* left out, such as '(mtp|visual)\."):
        CausalLM.load(tmp_path / "more")
    command = [sys.executable, "-m", "deltarule", "convert", tmp_path / "more", tmp_path / "own"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"deltarule: note: {tmp_path / 'more'}: 2 tensors that are no")
    convert(tmp_path / "whole", tmp_path / "again")
    same_files(tmp_path / "again", tmp_path / "own")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_one_tensor_is_in_memory_at_a_time(saved, tmp_path):
    sizes = {"vocab_size": 999, "hidden_size": 512, "num_layers": 8, "num_heads": 4}
    model = CausalLM(ModelConfig(layer_types="kda", **sizes))
    model.save(tmp_path / "large")
    first = "from deltarule.models.convert.copy import convert; convert(*sys.argv[1:3], 'kda')"
    then, folders = "convert(*sys.argv[3:], 'kda')", (saved, tmp_path / "a", tmp_path / "large")
    grown = growth(first, then, *folders, tmp_path / "b")
    assert grown < sum(p.nbytes for p in model.parameters()) / 4
