"""What a language model is trained on: documents read into memory, or token shards on disk."""

from typing import NamedTuple

from deltarule.train.data import Corpus
from deltarule.train.documents import DataError, limit_bytes, read_documents, split_documents
from deltarule.train.extra import MissingExtraError
from deltarule.train.token_shards import is_token_folder, open_token_folder, sample_documents
from deltarule.train.vocabulary import Encoder, make_encoder


class TextData(NamedTuple):
    """The data, what is trained on, and what is held out."""

    source: str
    documents: int
    num_bytes: int
    sha256: str
    notes: list[str]
    training: Corpus
    validation: Corpus
    vocab_size: int
    # None: the tokenizer of shards is not there any more.
    encoder: Encoder | None


def read_text(
    data: str | None,
    *,
    max_bytes: int,
    validation_fraction: float,
    validation_bytes: int,
    text_field: str,
    tokenizer: str | None = None,
) -> TextData:
    """Read documents as tokens, or map token shards, as the options of `TextRun` say."""
    if data is not None and is_token_folder(data):
        return _mapped(data, validation_bytes, tokenizer)
    encoder = make_encoder(tokenizer)
    read = read_documents(data, max_bytes=max_bytes, text_field=text_field)
    training, held_out = split_documents(read.documents, fraction=validation_fraction)
    held_out = limit_bytes(held_out, validation_bytes)
    first, second = (encoder.corpus([d.text for d in part]) for part in (training, held_out))
    for part, what in ((first, "train"), (second, "validate")):
        if not part.num_bytes:
            raise DataError(
                f"--validation-fraction {validation_fraction:g} of {read.num_bytes:,} bytes "
                f"leaves nothing to {what} on"
            )
    return TextData(
        read.source, len(read.documents), read.num_bytes, read.sha256, read.notes, first, second,
        encoder.vocab_size, encoder,
    )  # fmt: skip


def _mapped(folder: str, validation_bytes: int, tokenizer: str | None) -> TextData:
    opened = open_token_folder(folder)
    if tokenizer not in (None, made := opened.index.tokenizer):
        raise DataError(f"--tokenizer {tokenizer}: the shards in {folder} are of {made or 'bytes'}")
    encoder, notes = None, []
    try:
        encoder = make_encoder(folder if made else None)
    except (ValueError, MissingExtraError) as error:
        notes = [f"no sample, and no tokenizer beside the model: {error}"]
    held_out = sample_documents(opened.validation, validation_bytes)
    sets = opened.index.training, opened.index.validation
    return TextData(
        folder, sum(facts.documents for facts in sets), sum(facts.bytes for facts in sets),
        " ".join(facts.sha256 for facts in sets), notes,
        opened.training, held_out, opened.index.vocab_size, encoder,
    )  # fmt: skip
