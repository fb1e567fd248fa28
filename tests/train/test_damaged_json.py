"""Files of JSON that were damaged or changed: refused in one line that names what, or harmless."""

import json
import re

import pytest
import torch

from deltarule.models import CausalLM
from deltarule.parallel import World
from deltarule.train.checkpoint import MARKER, read_checkpoint
from deltarule.train.documents import read_documents
from deltarule.train.run_folder import DataFacts, open_run, read_run, stored_configuration
from deltarule.train.text import TextRun
from deltarule.train.token_shards import DataRun, open_token_folder, write_data


def read_configuration(folder):
    return stored_configuration(folder, TextRun, "train text")


READERS = [
    ("config.json", CausalLM.load), ("run.json", read_run), ("run.json", read_configuration),
    ("tokens.json", open_token_folder), (MARKER, read_checkpoint),
    ("rows.jsonl", lambda folder: read_documents(folder / "rows.jsonl")),
]  # fmt: skip
CONTENTS = [
    b"", b"null", b"[]", b"{}", b'{"command": 1', b'{"command": "train mqar"}', b'{"text": null}',
    b'{"format": 2}', b'{"step": "1", "sha256": [], "own_sha256": 7}', b"\xff\xfe", b"[" * 100_000,
    b'{"command": 1' + b"0" * 9999 + b"}",
]  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: str(content[:20]))
@pytest.mark.parametrize(("name", "read"), READERS)
def test_a_damaged_file_is_one_line_that_names_it(name, read, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)
    # Another field of an object may be the text.
    assert "--text-field" not in str(caught.value) or content.endswith(b"}")


def make_run(folder):
    alone, data = World(torch.device("cpu")), DataFacts("x", 10, "0")
    with open_run(TextRun(runs=folder), "train text", "text", alone, data) as made:
        return made, read_configuration


def make_shards(folder):
    (folder / "text.txt").write_text("a line of thirty characters...\n" * 99)
    write_data(DataRun(folder / "text.txt", folder / "tokens", validation_fraction=0.2))
    return folder / "tokens", open_token_folder


@pytest.mark.parametrize("value", [None, [], {}, "x", -1, 1.5, True, [[]], float("nan"), 2**62])
@pytest.mark.parametrize(("name", "make"), [("run.json", make_run), ("tokens.json", make_shards)])
def test_every_field_is_taken_or_refused_by_name(name, make, value, tmp_path):
    folder, read = make(tmp_path)
    whole, refused = json.loads((folder / name).read_text()), []
    inner = [whole, whole.get("configuration", whole.get("training"))]
    for fields in (*inner, *(x for x in inner[1].values() if isinstance(x, dict))):
        kept = dict(fields)
        # A newer version may have written more.
        for field in (*kept, "flux"):
            fields[field] = value
            (folder / name).write_text(json.dumps(whole))
            fields.clear()
            fields.update(kept)
            try:
                read(folder)
            except ValueError as error:
                refused.append((field, str(error)))
    assert len(refused) > 7
    assert "flux" in dict(refused)
    for field, said in refused:
        assert "\n" not in said
        assert str(folder) in said or "write it again" in said
        assert name != "run.json" or field in said or "not of 'train text'" in said
