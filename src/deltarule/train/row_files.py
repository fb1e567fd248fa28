"""Texts in rows of a file: a line of .jsonl or a row of .parquet is a document."""

from collections.abc import Callable, Iterator
from pathlib import Path

from deltarule.errors import reason
from deltarule.json_file import fitted, parse_object
from deltarule.train.extra import MissingExtraError, require

# Rows of a .parquet file that are in memory together, and bytes that are read of it at once.
BATCH, BUFFER = 64, 2**20
HINT = "; --text-field names the field with the text"


class RowFileError(ValueError):
    """A row cannot be read, or has no text; the message names file, row and field."""


def jsonl_texts(file: Path, field: str) -> Iterator[bytes]:
    """The texts of a file with a JSON object a line."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = parse_object(line.decode())
                if field not in row:
                    raise ValueError(f"no field {field!r} among {', '.join(row)}{HINT}")
                yield fitted(str, row[field], field).encode(errors="replace")
            except ValueError as error:
                raise RowFileError(f"{file}, line {number}: {reason(error)}") from None


def parquet_texts(file: Path, column: str) -> Iterator[bytes]:
    """The texts of a column of a .parquet file; rows without one are passed over."""
    try:
        arrow, parquet = require("pyarrow", "data"), require("pyarrow.parquet", "data")
    except MissingExtraError as error:
        raise MissingExtraError(f"{file}: {error}") from None
    try:
        # Read ahead, all that was read would stay until the end.
        opened = parquet.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False)
        names = opened.schema_arrow.names
        if column not in names:
            raise RowFileError(f"{file}: no column {column!r} among {', '.join(names)}{HINT}")
        for batch in opened.iter_batches(BATCH, columns=[column]):
            texts = batch.column(0).cast(arrow.binary()).to_pylist()
            yield from (text for text in texts if text is not None)
    except arrow.ArrowException as error:
        raise RowFileError(f"{file}: {reason(error)}") from None


READERS: dict[str, Callable[[Path, str], Iterator[bytes]]] = {
    ".jsonl": jsonl_texts, ".parquet": parquet_texts,
}  # fmt: skip
