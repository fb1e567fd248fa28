"""`train text --tokenizer`: trained, saved beside the model, read by generate and eval."""

import json
import logging
from dataclasses import replace

import pytest

from deltarule.cli import main
from deltarule.models.files import CONFIG
from deltarule.train import vocabulary
from deltarule.train.documents import DataError
from deltarule.train.report import EvalRun, evaluate_run
from deltarule.train.sample import GenerateRun, generate_text
from deltarule.train.text import train_text
from deltarule.train.token_shards import DataRun, open_token_folder, write_data
from deltarule.train.vocabulary import FILE, TokenDecoder, make_encoder, tokens_of
from small import small_run

TEXT = "".join(f"Zeile {i}: näher an der Küste, {i * i} Möwen\n" for i in range(400))


def make(folder, text=TEXT, size=300):
    """A folder with a tokenizer of bytes, and merges of a text."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([text], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def tool(tmp_path):
    """One of 40 merges."""
    return make(tmp_path / "tool")


@pytest.mark.parametrize("size", [300, 290])
def test_a_run_goes_on_with_its_own_tokenizer_alone_and_another_changes_nothing(
    tool, size, tmp_path
):
    (tmp_path / "text.txt").write_text(TEXT)
    run = small_run(tmp_path / "text.txt", tmp_path / "runs", tokenizer=str(tool), name="a")
    folder = train_text(run)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    more = replace(run, resume=True, loop=replace(run.loop, steps=8))
    make(tool, TEXT[::-1], size)
    with pytest.raises(ValueError, match=f"its {size} tokens are not the 300 of .*{FILE}: put"):
        train_text(more)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    make(tool)
    train_text(more)


def test_a_tokenizer_goes_along_with_the_model(tool, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    folder = train_text(
        small_run(tmp_path / "text.txt", tmp_path / "runs", tokenizer=str(tool), sample_bytes=20)
    )
    assert "sample, 20 tokens" in capsys.readouterr().out
    assert (folder / FILE).is_file()
    assert json.loads((folder / CONFIG).read_text())["vocab_size"] == 300
    # The run keeps what it needs.
    for path in tool.iterdir():
        path.unlink()
    generate_text(GenerateRun(folder, prompt="Zeile ü", max_new_tokens=8, seed=0, device="cpu"))
    assert capsys.readouterr().out.startswith("Zeile ü")
    bins = evaluate_run(EvalRun(folder, length=32, max_bytes=500, device="cpu"))
    # A bit and a half of a token's eight: its tokens are longer than a byte.
    assert 2 < bins[0].bits_per_byte < 8
    assert main(["plot", "attention", str(folder)]) == 1
    assert "must hold a model of bytes, got" in capsys.readouterr().err
    fields = json.loads((folder / CONFIG).read_text())
    with pytest.raises(ValueError, match=f"{FILE}: has 300 tokens, but vocab_size of the model"):
        tokens_of(folder, fields["vocab_size"] - 1)


def test_shards_bring_their_tokenizer(tool, tmp_path, capsys, monkeypatch):
    # Lines are joined by no merge: cut there, the text has the same tokens.
    monkeypatch.setattr(vocabulary, "BLOCK_BYTES", 100)
    (tmp_path / "text.txt").write_text(TEXT)
    data, encoder = tmp_path / "shards", make_encoder(str(tool))
    write_data(DataRun(tmp_path / "text.txt", data, tokenizer=str(tool), validation_fraction=0.2))
    opened = open_token_folder(data)
    assert opened.index.vocab_size == 300
    first, *tokens = opened.training.tokens[0 : int(opened.training.bounds[1])].tolist()
    assert first == encoder.begin
    assert TEXT.startswith(encoder.tool.decode(tokens))
    assert opened.training.num_bytes > 1.5 * opened.training.predicted > len(TEXT) / 3
    for path in tool.iterdir():
        path.unlink()
    folder = train_text(small_run(data, tmp_path / "runs"))
    assert (folder / FILE).is_file()
    with pytest.raises(DataError, match=r"the shards in .* have"):
        train_text(small_run(data, tmp_path / "runs", tokenizer="another"))
    (data / FILE).unlink()
    (data / "tokenizer_config.json").unlink()
    train_text(small_run(data, tmp_path / "more"))
    assert "note: no sample, and no tokenizer beside the model" in capsys.readouterr().out


def test_streamed_text_is_whole_characters(tool):
    encoder = make_encoder(str(tool))
    text = "näher 😀 an der Küste 日本\n"
    begin, *tokens = encoder.prompt(text)
    corpus = encoder.corpus([text.encode(), b"", b"x"])
    assert corpus.bounds.tolist() == [0, 1 + len(tokens), 3 + len(tokens)]
    assert corpus.tokens[: 1 + len(tokens)].tolist() == [begin, *tokens]
    assert corpus.num_bytes == len(text.encode()) + 1
    decoder = TokenDecoder(encoder.tool)
    parts = [decoder.push(token) for token in tokens]
    assert "".join([*parts, decoder.finish()]) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts)
    assert decoder.push(encoder.begin) + decoder.finish() == ""
    # Half a character is shown as such in the end.
    assert decoder.push(encoder.prompt("ß")[1]) == ""
    assert decoder.finish() == "\N{REPLACEMENT CHARACTER}"


def test_half_a_character_amid_bytes_does_not_end_the_stream():
    """Such as a model may draw from a vocabulary that falls back to bytes, as Llama's does."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁sea"]
    tool = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    parts = tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback()
    tool.decoder = tokenizers.decoders.Sequence([*parts, tokenizers.decoders.Fuse()])
    decoder = TokenDecoder(transformers.PreTrainedTokenizerFast(tokenizer_object=tool))
    tokens = [1 + byte for byte in "😀".encode() + "😀".encode()[:2]]
    shown = "".join(map(decoder.push, [*tokens, len(words) - 1])) + decoder.finish()
    assert shown.startswith("😀")
    assert shown.endswith(" sea")


def test_what_does_not_fit_is_named(tool, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(ValueError, match=r"--tokenizer .*nowhere: "):
        train_text(small_run(tmp_path / "text.txt", tmp_path / "runs", tokenizer="/nowhere"))
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ValueError, match=f"holds a model of 300 tokens and no {FILE}"):
        tokens_of(tmp_path, 300)
    make_encoder(str(tool)).save(tmp_path)
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(ValueError, match=f"^{tmp_path / FILE}: cannot be read: KeyError"):
        tokens_of(tmp_path, 300)


def test_a_model_beside_it_is_no_matter_of_the_tokenizers(tool, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    (tool / "config.json").write_text('{"model_type": "deltarule"}')
    make_encoder(str(tool))
    assert not caplog.messages
