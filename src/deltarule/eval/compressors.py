"""What general compressors need for the same bytes, as a yardstick for a model."""

import gzip
import lzma

from deltarule.models.bytes import BEGIN
from deltarule.train.data import Corpus


def compressed_bits_per_byte(corpus: Corpus) -> dict[str, float]:
    """Bits per byte of gzip and xz at their strongest, on all documents as one stream.

    That favours the compressors, which may look back from one document into those before it.

    Example:
        >>> from deltarule.train.data import encode_documents
        >>> compressed_bits_per_byte(encode_documents([b"ab" * 10_000]))["gzip"] < 0.1
        True
    """
    tokens = corpus.tokens[corpus.tokens != BEGIN]
    text = tokens.astype("uint8").tobytes()
    sizes = {
        "gzip": len(gzip.compress(text, compresslevel=9)),
        "xz": len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)),
    }
    return {name: 8 * size / len(text) for name, size in sizes.items()}
