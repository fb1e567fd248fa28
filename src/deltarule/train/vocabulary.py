"""Text as tokens and back: bytes, or the tokens of any fast tokenizer of Hugging Face."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltarule.models.bytes import BEGIN, VOCAB_SIZE, ByteDecoder
from deltarule.models.bytes import encode as encode_bytes
from deltarule.train.data import Corpus, encode_documents, joined
from deltarule.train.extra import require

BLOCK_BYTES = 2**18  # of one text that a tokenizer is given: it keeps far more than these
# What a fast tokenizer is saved as, beside the model that reads its tokens.
FILE = "tokenizer.json"


class Encoder(NamedTuple):
    """How text becomes tokens, the token that begins every document, and how many there are."""

    encode: Callable[[list[bytes]], list[NDArray[Any]]]
    begin: int
    vocab_size: int
    # Of Hugging Face; None: tokens are bytes.
    tool: Any = None

    def prompt(self, text: str) -> list[int]:
        if self.tool is None:
            return encode_bytes(text, begin=True)
        return [self.begin, *self.encode([text.encode("utf-8", "replace")])[0].tolist()]

    def decoder(self) -> "ByteDecoder | TokenDecoder":
        return ByteDecoder() if self.tool is None else TokenDecoder(self.tool)

    def corpus(self, texts: Sequence[bytes | memoryview]) -> Corpus:
        if self.tool is None:
            return encode_documents(texts)
        read = [bytes(text) for text in texts if text]
        parts = [np.concatenate([[self.begin], tokens]) for tokens in self.encode(read)]
        return joined(parts, sum(map(len, read)))

    def save(self, folder: Path) -> None:
        """Write the tokenizer beside a model, which must not have another one already.

        One that cannot be read is what a kill left of this.
        """
        file, before = folder / FILE, self
        if self.tool and file.is_file():
            with contextlib.suppress(ValueError):
                before = make_encoder(str(folder), str(file))
        if before.tool and before.tool.get_vocab() != self.tool.get_vocab():
            raise ValueError(
                f"--tokenizer: its {self.vocab_size} tokens are not the {before.vocab_size} of "
                f"{file}: put that tokenizer back, or start another run with --name"
            )
        if self.tool:
            self.tool.save_pretrained(folder)


class TokenDecoder:
    """Decodes a stream of a tokenizer's tokens: text appears once no later token can change it."""

    def __init__(self, tool: Any) -> None:
        self.tool, self.tokens = tool, list[int]()
        # Tokens that stand before those to be read, for what joins them; and those shown already.
        self.before, self.shown = 0, 0

    def push(self, token: int) -> str:
        """Take one token; return the text that it completes, often none."""
        self.tokens.append(token)
        text = self.new()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self.before, self.shown = self.shown, len(self.tokens)
        return text

    def finish(self) -> str:
        """Return what is held back; then start afresh."""
        text = self.new()
        self.tokens, self.before, self.shown = [], 0, 0
        return text

    def new(self) -> str:
        known, every = (
            self.tool.decode(self.tokens[self.before : end], skip_special_tokens=True)
            for end in (self.shown, len(self.tokens))
        )
        return str(every)[len(known) :]


def tokens_of(folder: Path, vocab_size: int) -> Encoder:
    """The tokens of a model of so many, from what lies beside it, or bytes."""
    if not (folder / FILE).is_file():
        if vocab_size == VOCAB_SIZE:
            return make_encoder(None)
        said = f"{folder}: holds a model of {vocab_size} tokens and no {FILE} to read text with"
        raise ValueError(f"{said}: copy the files of its tokenizer there")
    encoder = make_encoder(str(folder), str(folder / FILE))
    if encoder.vocab_size > vocab_size:
        raise ValueError(
            f"{folder / FILE}: has {encoder.vocab_size} tokens, but vocab_size of the model is "
            f"{vocab_size}: it belongs to another model"
        )
    return encoder


def make_encoder(tokenizer: str | None, named: str | None = None) -> Encoder:
    """Bytes, or a tokenizer of Hugging Face, one of whose tokens begins a document.

    Errors call it `named`; None: the flag.
    """
    if tokenizer is None:
        return Encoder(lambda texts: [np.frombuffer(t, np.uint8) for t in texts], BEGIN, VOCAB_SIZE)
    named = named or f"--tokenizer {tokenizer}"
    if Path(tokenizer).is_absolute() and not Path(tokenizer).exists():
        raise ValueError(f"{named}: no such folder")
    transformers = require("transformers", "hf")
    told = transformers.utils.logging
    verbosity = told.get_verbosity()
    told.set_verbosity_error()  # else it says that it does not know the model beside it
    try:
        tool = transformers.AutoTokenizer.from_pretrained(tokenizer)
    except Exception as error:  # of any kind, from a damaged file
        reason = f"cannot be read: {type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"{named}: {reason}") from error
    finally:
        told.set_verbosity(verbosity)
    begin = tool.bos_token_id if tool.bos_token_id is not None else tool.eos_token_id
    if begin is None:
        raise ValueError(f"{named}: has neither bos_token nor eos_token to begin documents")

    def encode(texts: list[bytes]) -> list[NDArray[Any]]:
        cut = [blocks(text) for text in texts]
        flat = [block.decode(errors="replace") for of_one in cut for block in of_one]
        found = iter(tool(flat, add_special_tokens=False, verbose=False)["input_ids"])
        return [np.concatenate([np.array(next(found), np.int64) for _ in of_one]) for of_one in cut]

    return Encoder(encode, int(begin), max(len(tool), int(begin) + 1), tool)


def blocks(text: bytes) -> list[bytes]:
    """A text in stretches that end with a line, so that a long one takes little memory."""
    found = []
    while len(text) > BLOCK_BYTES:
        cut = text.rfind(b"\n", 0, BLOCK_BYTES) + 1 or BLOCK_BYTES
        found.append(text[:cut])
        text = text[cut:]
    return [*found, text]
