"""Which files become documents, and what is said about those that cannot."""

import json
import os
import random
import sys
import sysconfig

import pytest
import torch

import deltarule.train.documents
from deltarule.train.data import ShuffledRows, encode_documents
from deltarule.train.documents import DataError, Document, is_text, limit_bytes, read_documents
from deltarule.train.documents import split_documents as split
from deltarule.train.extra import MissingExtraError

TEXT = b"To be, or not to be: that is the question.\n" * 40


def test_default_is_the_standard_library_without_installed_packages():
    read = read_documents()
    names = [document.name for document in read.documents]
    assert "json/decoder.py" in names
    assert all(name.endswith(".py") and "site-packages" not in name for name in names)
    assert sysconfig.get_path("stdlib") not in read.source


def test_a_folder_is_searched_and_binary_hidden_and_linked_files_are_left_out(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "a.txt").write_bytes(TEXT)
    (tmp_path / "b.md").write_bytes("naïve café\n".encode("latin-1") * 200)
    (tmp_path / "model.bin").write_bytes(random.Random(0).randbytes(5000))
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_bytes(TEXT)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(TEXT)
    (tmp_path / "dead").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    read = read_documents(tmp_path)
    assert {document.name for document in read.documents} == {"deep/er/a.txt", "b.md"}
    assert read.notes == ["1 binary file left out: model.bin"]


def test_reading_stops_at_max_bytes_with_a_note(tmp_path):
    for name in "abc":
        (tmp_path / name).write_bytes(TEXT)
    read = read_documents(tmp_path, max_bytes=len(TEXT) + 1)
    assert [(d.name, len(d.text)) for d in read.documents] == [("a", len(TEXT)), ("b", 1)]
    assert "--max-bytes" in read.notes[0]
    alone = read_documents(tmp_path / "a", max_bytes=1234)
    assert alone.documents == [Document("a", TEXT[:1234])]
    assert "--max-bytes" in alone.notes[0]


MADE = [
    ("run.json", ".lock"), ("run.json", "metrics.jsonl"), ("metrics.jsonl", ".lock"),
    ("tokens.json", "training.bounds"),
]  # fmt: skip


@pytest.mark.parametrize("marks", MADE)
def test_the_folders_of_runs_and_shards_are_never_data(tmp_path, marks):
    (tmp_path / "book.txt").write_bytes(TEXT)
    before = read_documents(tmp_path).sha256
    run = tmp_path / "runs" / "text"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    for name in (*marks, "diverged.txt", "checkpoints/step-1/state.json"):
        (run / name).write_bytes(TEXT)
    read = read_documents(tmp_path)
    assert read.sha256 == before
    assert read.notes == [f"1 folder of runs or shards left out: {run.relative_to(tmp_path)}"]
    with pytest.raises(DataError, match="1 folder of runs or shards left out"):
        read_documents(run)


def test_a_name_that_is_no_text_can_be_shown(tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT)
    with open(os.fsencode(tmp_path) + b"/\xff.bin", "wb") as file:
        file.write(b"\0" * 100)
    assert read_documents(tmp_path).notes == [r"1 binary file left out: \xff.bin"]


def test_what_would_fill_the_memory_stays_in_its_file(tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / name).write_bytes(TEXT + name.encode() * 99)
    held = read_documents(tmp_path)
    monkeypatch.setattr(deltarule.train.documents, "IN_MEMORY", len(TEXT) + 100)
    monkeypatch.setattr(deltarule.train.documents, "MAPPED", 100)
    mapped = read_documents(tmp_path)
    assert [type(d.text) for d in mapped.documents] == [bytes, memoryview, memoryview]
    assert mapped.sha256 == held.sha256
    for fraction in (0.1, 0.4):
        parts = [split(read.documents, fraction=fraction) for read in (held, mapped)]
        corpora = [[encode_documents([d.text for d in part]) for part in both] for both in parts]
        for one, two in zip(*corpora, strict=True):
            assert one.bounds.tolist() == two.bounds.tolist()
            assert one.tokens[:].tolist() == two.tokens[:].tolist()
            rows = [ShuffledRows(c, length=50, row_tokens=333, seed=1) for c in (one, two)]
            for _ in range(40):
                first, second = (r.next() for r in rows)
                assert all(map(torch.equal, first, second))


def test_rows_of_jsonl_are_documents(tmp_path):
    rows = [{"text": TEXT.decode() + str(i), "id": i} for i in range(5)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    read = read_documents(file)
    assert [d.name for d in read.documents] == [f"rows.jsonl:{i}" for i in range(1, 6)]
    assert [d.text for d in read.documents] == [row["text"].encode() for row in rows]
    assert read_documents(file, max_bytes=len(TEXT) + 11).documents[1].text == TEXT[:10]
    with pytest.raises(
        DataError, match=r"rows\.jsonl, line 1: no field 'body' among text, id; --text-field"
    ):
        read_documents(file, text_field="body")
    with file.open("ab") as more:
        more.write(b'{"text": 7}\n')
    with pytest.raises(DataError, match=r"line 10: text: expected a string, got int 7"):
        read_documents(file)
    # Beside other files, it is left out from there on, with a note.
    assert "line 10" in read_documents(tmp_path).notes[0]


def test_the_file_that_needs_an_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtraError, match=r"x\.parquet: this needs pyarrow.*\[data\]"):
        read_documents(tmp_path)


def test_rows_of_parquet_are_documents(tmp_path):
    import pyarrow as arrow
    from pyarrow import parquet

    texts = [TEXT.decode() + str(i) for i in range(5)] + [None]
    parquet.write_table(arrow.table({"body": texts, "n": range(6)}), tmp_path / "x.parquet")
    read = read_documents(tmp_path, text_field="body")
    assert [d.text.decode() for d in read.documents] == texts[:5]
    with pytest.raises(DataError, match="no column 'text' among body, n; --text-field"):
        read_documents(tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet"):
        read_documents(tmp_path / "x.parquet", text_field="n")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match=r"x\.parquet"):
        read_documents(tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (None, "no such file or folder"),
        ({}, "empty; give a text file"),
        ({"a.txt": b""}, "empty; give a text file"),
        ({"a.bin": b"\0\1\2" * 1000}, r"no readable text \(1 binary file left out: a.bin\)"),
        ({"a.txt": b"too short"}, "too short, 9 bytes"),
    ],
)
def test_useless_data_is_an_error_that_names_the_path(tmp_path, files, says):
    path = tmp_path / "data"
    if files is not None:
        path.mkdir()
    for name, content in (files or {}).items():
        (path / name).write_bytes(content)
    with pytest.raises(DataError, match=says) as error:
        read_documents(path)
    assert str(path) in str(error.value)


def test_a_binary_file_and_a_pipe_by_name_are_refused_and_terminal_colours_are_text(tmp_path):
    binary, pipe = tmp_path / "x.gz", tmp_path / "pipe"
    binary.write_bytes(b"\x1f\x8b\0\0" * 500)
    os.mkfifo(pipe)
    for path, says in ((binary, r"x\.gz"), (pipe, "neither a file nor a folder")):
        with pytest.raises(DataError, match=says):
            read_documents(path)
    assert is_text(b"\x1b[31mred\x1b[0m and plain text\r\n")
    assert not is_text(random.Random(1).randbytes(300))
    assert not is_text("UTF-16".encode("utf-16"))


def test_split_is_by_document_repeatable_near_the_fraction_and_few_move_for_one_more():
    documents = [Document(f"{i}.txt", bytes(100 + i)) for i in range(100)]
    training, validation = split(documents, fraction=0.2)
    assert (training, validation) == split(documents, fraction=0.2)
    assert sorted(d.name for d in training + validation) == sorted(d.name for d in documents)
    share = sum(len(d.text) for d in validation) / sum(len(d.text) for d in documents)
    assert 0.15 < share < 0.25
    before = {d.name for d in split(documents)[1]}
    after = {d.name for d in split([*documents, Document("new", bytes(100))])[1]}
    assert len(before ^ after) <= 2


@pytest.mark.parametrize("sizes", [[1000], [1000, 3], [1, 1, 50_000]])
def test_few_or_unequal_documents_are_cut_at_their_ends(sizes):
    documents = [Document(str(i), bytes(range(256)) * n) for i, n in enumerate(sizes)]
    training, validation = split(documents)
    assert training
    assert validation
    first, tail = training[-1].text, validation[-1].text
    assert first + tail == documents[-1].text
    assert len(tail) / len(documents[-1].text) == pytest.approx(0.1, abs=0.01)
    # No fraction may leave a part empty.
    for fraction in (0, 1, -1, float("nan")):
        with pytest.raises(ValueError, match="validation_fraction"):
            split(documents, fraction=fraction)


def test_limit_bytes_takes_many_documents_and_no_more_than_asked():
    documents = [Document(str(i), bytes(30)) for i in range(99)]
    assert sum(len(d.text) for d in limit_bytes(documents, 100)) == 100
    assert len(limit_bytes(documents, 10**9)) == 99
    long = [Document("long", bytes(10_000)), *documents]
    assert max(len(d.text) for d in limit_bytes(long, 8000)) == 500
    assert [len(d.text) for d in limit_bytes(long[:1], 1600)] == [1600]
    assert limit_bytes([], 5) == []
    # A byte at least is left of what is there.
    assert [len(d.text) for d in limit_bytes(documents, 3)] == [1, 1, 1]
