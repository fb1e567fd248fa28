"""What a language model is trained on: documents read into memory, or token shards on disk."""

from typing import NamedTuple

from deltarule.models.bytes import VOCAB_SIZE
from deltarule.train.data import Corpus, encode_documents
from deltarule.train.documents import DataError, limit_bytes, read_documents, split_documents
from deltarule.train.token_shards import (
    TRAINING,
    VALIDATION,
    is_token_folder,
    open_token_folder,
    sample_documents,
)


class TextData(NamedTuple):
    """The data, what is trained on, and what is held out."""

    source: str
    documents: int
    num_bytes: int
    sha256: str
    notes: list[str]
    training: Corpus
    validation: Corpus
    vocab_size: int = VOCAB_SIZE


def read_text(
    data: str | None,
    *,
    max_bytes: int,
    validation_fraction: float,
    validation_bytes: int,
    text_field: str,
) -> TextData:
    """Read documents as bytes, or map token shards.

    Args:
        data: A file or folder of text, or what `deltarule data` wrote; None: the standard library.
        max_bytes: Of text, stop reading after so many.
        validation_fraction: Of text, the share that is held out; of shards it is settled.
        validation_bytes: Use at most so much of what is held out.
        text_field: The field with the text of rows in .jsonl and .parquet files.

    Returns:
        Both parts, and what the data are.

    Raises:
        DataError: They cannot be trained on, or one of the parts would be empty.
    """
    if data is not None and is_token_folder(data):
        return _mapped(data, validation_bytes)
    read = read_documents(data, max_bytes=max_bytes, text_field=text_field)
    training, held_out = split_documents(read.documents, fraction=validation_fraction)
    held_out = limit_bytes(held_out, validation_bytes)
    first, second = (encode_documents([d.text for d in part]) for part in (training, held_out))
    for part, what in ((first, "train"), (second, "validate")):
        if not part.num_bytes:
            raise DataError(
                f"--validation-fraction {validation_fraction:g} of {read.num_bytes:,} bytes "
                f"leaves nothing to {what} on"
            )
    return TextData(
        read.source, len(read.documents), read.num_bytes, read.sha256, read.notes, first, second
    )


def _mapped(folder: str, validation_bytes: int) -> TextData:
    opened = open_token_folder(folder)
    held_out = sample_documents(opened.validation, validation_bytes)
    sets = [opened.index[name] for name in (TRAINING, VALIDATION)]
    documents, num_bytes = (sum(facts[name] for facts in sets) for name in ("documents", "bytes"))
    return TextData(
        folder, documents, num_bytes, " ".join(facts["sha256"] for facts in sets), [],
        opened.training, held_out, opened.index["vocab_size"],
    )  # fmt: skip
