"""Checkpoints are whole or absent, whatever happens to the writer, and damage is noticed."""

import errno
import hashlib
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import deltarule.train.checkpoint
from deltarule.models import CheckpointError
from deltarule.train.checkpoint import MARKER, Checkpoints, Marker, fill, read_checkpoint
from deltarule.train.sharded_checkpoint import read_shards

TENSORS = {"w": torch.arange(6.0).reshape(2, 3)}


def test_save_and_read_back(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new" / "folder", keep=3)
    assert checkpoints.newest() is None
    checkpoints.save(5, TENSORS, {"position": {"epoch": 1}})
    newest = checkpoints.newest()
    assert newest.step == 5
    assert newest.state == {"position": {"epoch": 1}}
    found = {"w": torch.zeros(2, 3)}
    fill(newest.folder, found)
    assert torch.equal(found["w"], TENSORS["w"])
    files = sorted(path.name for path in (checkpoints.folder / "step-5").iterdir())
    assert files == [MARKER, "model.safetensors", "optimizer.safetensors", "state.json"]


def test_keep_is_by_step_and_saving_again_replaces(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (9, 10, 100):
        checkpoints.save(step, TENSORS, {"n": step})
    assert checkpoints.steps() == [10, 100]
    checkpoints.save(100, TENSORS, {"n": -1})
    assert checkpoints.newest().state == {"n": -1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-100"]
    with pytest.raises(ValueError, match="keep"):
        Checkpoints(tmp_path, keep=0)


def rewrite_marker(folder, **fields):
    """As one would who knows how."""
    written = json.loads((folder / MARKER).read_text()) | fields
    marker = Marker(written["step"], written["sha256"])
    (folder / MARKER).write_text(json.dumps(written | {"own_sha256": marker.hash()}))


def on(name, change):
    """The bytes of a file, changed."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def says_more(folder):
    hashes = json.loads((folder / MARKER).read_text())["sha256"]
    rewrite_marker(folder, sha256=hashes | {"../../secret.safetensors": "0"})


WEIGHTS = "model.safetensors"

DAMAGES = {
    "truncated": on(WEIGHTS, lambda x: x[:-4]),
    "flipped": on(WEIGHTS, lambda x: x[:-1] + bytes([x[-1] ^ 1])),
    "removed": lambda folder: (folder / "state.json").unlink(),
    "added": lambda folder: (folder / "more.safetensors").touch(),
    "outside": says_more,
    "another step": on(MARKER, lambda x: x.replace(b'"step": ', b'"step": 9')),
    "another step, hashed": lambda folder: rewrite_marker(folder, step=77),
    "nothing named": lambda folder: rewrite_marker(folder, sha256={}),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_alone_is_an_error(tmp_path, damage, capsys):
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save(1, TENSORS, {})
    checkpoints.save(2, TENSORS, {})
    damage(tmp_path / "step-2")
    assert checkpoints.newest().step == 1
    assert "skipped a damaged checkpoint" in capsys.readouterr().out
    # Without its marker a folder is no checkpoint.
    (tmp_path / "step-2" / MARKER).unlink()
    assert checkpoints.steps() == [1]
    damage(tmp_path / "step-1")
    with pytest.raises(CheckpointError, match="step-1"):
        checkpoints.newest()


def test_what_a_file_manager_leaves_in_a_checkpoint_does_not_damage_it(tmp_path):
    folder = Checkpoints(tmp_path, keep=1).save(1, TENSORS, {})
    for name in (".DS_Store", "Thumbs.db", ".nfs0001"):
        (folder / name).touch()
    assert read_checkpoint(folder).step == 1


def test_no_bit_of_the_marker_can_be_changed_unseen(tmp_path):
    folder = Checkpoints(tmp_path, keep=1).save(1, TENSORS, {})
    marker = (folder / MARKER).read_bytes()
    read_checkpoint(folder)
    for bit in range(8 * len(marker)):
        damaged = bytearray(marker)
        damaged[bit // 8] ^= 1 << bit % 8
        (folder / MARKER).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=MARKER) as caught:
            read_checkpoint(folder)
        assert "\n" not in str(caught.value)


def test_a_write_that_fails_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save(1, TENSORS, {})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(deltarule.train.checkpoint, "save_file", full)
    # A damaged one of the same step stays until its replacement is there.
    for step in (1, 2):
        with pytest.raises(OSError, match="No space"):
            checkpoints.save(step, TENSORS, {})
        assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_damaged_checkpoint_outlives_a_stop_amid_its_replacement(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    folder, rename = checkpoints.save(1, TENSORS, {"n": 1}), Path.rename

    def killed(path, target):
        if path.name.endswith(".tmp") and target == folder:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(1, TENSORS, {"n": 2})
    assert (tmp_path / "step-1.damaged/state.json").read_text() == '{"n": 1}'
    assert checkpoints.steps() == []
    Checkpoints(tmp_path).save(1, TENSORS, {"n": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_what_is_removed_is_hidden_first_and_the_next_start_removes_it(tmp_path, monkeypatch):
    """A kill midway through the removal leaves no half of a `step-N`."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, TENSORS, {})
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        checkpoints.save(2, TENSORS, {})
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-2"]
    Checkpoints(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


class Trap:
    """What, unpickled, makes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


def test_a_pickle_with_the_right_hash_is_refused_and_never_run(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    folder = checkpoints.save(1, TENSORS, {})
    content = pickle.dumps(Trap(tmp_path / "sprung"))
    (folder / "model.safetensors").write_bytes(content)
    hashes = json.loads((folder / MARKER).read_text())["sha256"]
    hashes["model.safetensors"] = hashlib.sha256(content).hexdigest()
    rewrite_marker(folder, sha256=hashes)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        fill(folder, dict(TENSORS))
    assert not (tmp_path / "sprung").exists()


def test_shards_are_read_without_a_pickle_and_those_of_another_model_named_in_one_line(tmp_path):
    """Not the metadata that PyTorch would read, nor a shard that is one."""
    shard = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    content = pickle.dumps(Trap(tmp_path / "sprung"))
    (tmp_path / ".metadata").write_bytes(content)
    save_file(TENSORS, shard)
    found = {"w": torch.zeros(2, 3)}
    read_shards(tmp_path, found)
    assert torch.equal(found["w"], TENSORS["w"])
    for wanted, message in (({"w": torch.zeros(3, 3)}, "Size"), ({"v": torch.zeros(1)}, "v")):
        with pytest.raises(CheckpointError) as caught:
            read_shards(tmp_path, wanted)
        (line,) = str(caught.value).splitlines()
        assert line.startswith(f"{tmp_path}: not a checkpoint of this model: ")
        assert message in line.partition("model: ")[2]
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a checkpoint of this model"):
        read_shards(tmp_path, found)
    assert not (tmp_path / "sprung").exists()
