"""Token shards: what is written is the text, and rows are those of memory, from any position."""

import dataclasses
import errno
import json
import shutil
import sys

import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch

from deltarule.models import CausalLM
from deltarule.models.bytes import BEGIN
from deltarule.train import token_shards, vocabulary
from deltarule.train.data import ShuffledRows, encode_documents
from deltarule.train.documents import DataError
from deltarule.train.report import EvalRun, evaluate_run
from deltarule.train.text import train_text
from deltarule.train.token_shards import DataRun, divided, open_token_folder, write_data
from deltarule.train.vocabulary import blocks
from most_memory import growth
from small import small_run

TEXTS = [f"{i} bottles of beer, naïve ones\n" * (1 + i % 7) for i in range(60)]


@pytest.fixture
def source(tmp_path):
    """Documents as files, lines and rows."""
    folder = tmp_path / "source"
    folder.mkdir()
    for i, text in enumerate(TEXTS[:30]):
        (folder / f"{i:02}.txt").write_text(text)
    lines = [json.dumps({"text": text, "id": i}) for i, text in enumerate(TEXTS[30:50])]
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n")
    parquet.write_table(pyarrow.table({"text": TEXTS[50:]}), folder / "rows.parquet")
    (folder / "picture.bin").write_bytes(bytes(range(256)))
    return folder


def texts(corpus):
    """The documents of a corpus of bytes."""
    pairs = zip(corpus.bounds[:-1], corpus.bounds[1:], strict=True)
    documents = [corpus.tokens[a:b] for a, b in pairs]
    assert all(tokens[0] == BEGIN for tokens in documents)
    return [bytes(tokens[1:].astype("uint8")) for tokens in documents]


def test_every_document_is_there_once_in_order(source, tmp_path, capsys):
    out = tmp_path / "tokens"
    write_data(DataRun(source, out, validation_fraction=0.2, shard_tokens=500))
    opened = open_token_folder(out)
    wanted = [text.encode() for text in TEXTS]
    parts = [divided(text, number, 0.2) for number, text in enumerate(wanted)]
    for name in ("training", "validation"):
        expected = [text for part in parts for text, where in part if where == name]
        assert texts(getattr(opened, name)) == expected
        assert getattr(opened.index, name).bytes == sum(map(len, expected))
    assert len(opened.index.training.shards) > 3
    assert 0.1 < opened.validation.num_bytes / sum(map(len, wanted)) < 0.35
    said = capsys.readouterr().out
    assert "picture.bin is left out" in said
    assert "step" not in said


def test_rows_are_those_of_memory_from_any_position(source, tmp_path):
    out = tmp_path / "tokens"
    write_data(DataRun(source, out, shard_tokens=700))
    mapped = open_token_folder(out).training
    memory = encode_documents(texts(mapped))
    sizes = {"length": 24, "row_tokens": 100, "seed": 3}
    ours, theirs = ShuffledRows(mapped, **sizes), ShuffledRows(memory, **sizes)
    for _ in range(200):
        position = ours.position()
        a, b = ours.next(), theirs.next()
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert position["epoch"] > 1
    # As a checkpoint keeps it; in the middle of a piece as well.
    again = ShuffledRows(mapped, **sizes)
    again.seek(json.loads(json.dumps(position)))
    assert all(torch.equal(x, y) for x, y in zip(again.next(), a, strict=True))


def test_a_row_that_another_process_takes_is_not_read(source, tmp_path):
    write_data(DataRun(source, tmp_path / "tokens"))
    mapped = open_token_folder(tmp_path / "tokens").training

    class Unread:
        def __len__(self):
            return len(mapped.tokens)

        def __getitem__(self, span):
            raise AssertionError("it was read")

    rows = ShuffledRows(
        dataclasses.replace(mapped, tokens=Unread()), length=9, row_tokens=50, seed=0
    )
    for _ in range(3):
        rows.spans()
    with pytest.raises(AssertionError, match="it was read"):
        rows.next()


def test_train_text_reads_them_resumes_and_eval_too(source, tmp_path, capsys):
    out = tmp_path / "tokens"
    write_data(DataRun(source, out, validation_fraction=0.2))
    folder = train_text(small_run(out, tmp_path / "runs", name="a"))
    whole = CausalLM.load(folder).state_dict()
    shutil.rmtree(folder / "checkpoints/step-6")
    train_text(small_run(out, tmp_path / "runs", name="a", resume=True))
    again = CausalLM.load(folder).state_dict()
    assert all(torch.equal(x, again[name]) for name, x in whole.items())
    evaluate_run(EvalRun(folder, length=64))
    assert "the part held out of training" in capsys.readouterr().out
    # Other shards under the old name are other data.
    shutil.rmtree(out)
    write_data(DataRun(source, out, validation_fraction=0.3))
    with pytest.raises(ValueError, match="on other data"):
        train_text(small_run(out, tmp_path / "runs", name="a", resume=True))


def test_blocks_end_with_lines_and_are_the_text(monkeypatch):
    monkeypatch.setattr(vocabulary, "BLOCK_BYTES", 10)
    text = b"one two\nthree\n" + 25 * b"x" + b"\nlast"
    cut = blocks(text)
    assert b"".join(cut) == text
    assert cut[0] == b"one two\n"
    assert max(map(len, cut)) == 10


def test_a_file_is_one_document_and_a_long_one_several(tmp_path, monkeypatch, capsys):
    (tmp_path / "long.txt").write_text("a line of thirty characters...\n" * 200)
    write_data(DataRun(tmp_path / "long.txt", tmp_path / "one"))
    assert "training   1 document, " in capsys.readouterr().out
    monkeypatch.setattr(token_shards, "LONGEST_BYTES", 1000)
    write_data(DataRun(tmp_path / "long.txt", tmp_path / "tokens"))
    documents = texts(open_token_folder(tmp_path / "tokens").training)
    assert len(documents) > 4
    assert all(text.endswith(b"\n") for text in documents[1:])


def test_a_full_disk_is_named_and_nothing_is_left(source, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(token_shards.ShardWriter, "add", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/tokens'$"):
        write_data(DataRun(source, tmp_path / "tokens"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_bad_input_is_named_and_nothing_is_left(source, tmp_path):
    out = tmp_path / "tokens"
    for given, words in (
        ({"source": tmp_path / "none"}, "no such file"),
        ({"text_field": "body"}, r"lines.jsonl, line 1: .*body"),
        ({"source": source / "rows.parquet", "text_field": "body"}, "no column 'body' among text"),
        ({"tokenizer": str(tmp_path / "no-tool")}, r"--tokenizer .*no-tool: no such folder"),
    ):
        bad = DataRun(**{"source": source, "out": out} | given)
        with pytest.raises(ValueError, match=words):
            write_data(bad)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    write_data(DataRun(source, out))
    with pytest.raises(ValueError, match=r"--out .*: it exists; remove it"):
        write_data(DataRun(source, out, tokenizer="none"))
    bounds = out / "training.bounds"
    whole = bounds.read_bytes()
    bounds.write_bytes(bytes(16) + whole[16:])
    with pytest.raises(DataError, match=r"training\.bounds does not rise from 0 to [0-9,]+: write"):
        open_token_folder(out)
    bounds.write_bytes(whole)
    with (out / "training-00000.tokens").open("ab") as file:
        file.write(b"xx")
    with pytest.raises(DataError, match=r"training-00000.tokens has .* bytes, expected"):
        open_token_folder(out)


# pyarrow is there before.
IMPORTS = """
import pyarrow.parquet
from deltarule.train.token_shards import DataRun, write_data
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_memory_does_not_grow_with_the_source(kind, tmp_path):
    sizes, growths = [], []
    for count in (2000, 6000):
        texts, file = [f"{i} words " * 2000 for i in range(count)], tmp_path / f"{count}.{kind}"
        if kind == "jsonl":
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        else:
            whole = pyarrow.table({"text": texts})
            parquet.write_table(whole, file, compression="none", use_dictionary=False)
        then = "write_data(DataRun(*map(Path, sys.argv[1:])))"
        sizes.append(file.stat().st_size)
        growths.append(growth(IMPORTS, then, file, tmp_path / f"tokens-{count}"))
    assert growths[1] - growths[0] < (sizes[1] - sizes[0]) / 2
