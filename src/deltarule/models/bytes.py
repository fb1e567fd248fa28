"""Text as bytes: 256 byte tokens and BEGIN, with no vocabulary to train or to ship."""

import codecs
from collections.abc import Iterable

BEGIN = 256
VOCAB_SIZE = 257


def encode(text: str | bytes, *, begin: bool = False) -> list[int]:
    r"""Turn text into one token a byte of its UTF-8.

    tokens = [BEGIN] + bytes(text)   with begin, else bytes(text)

    Args:
        text: A string, or bytes taken as they are. Characters that Python made of undecodable
            bytes (`surrogateescape`, as in command-line arguments) turn back into those bytes.
        begin: Put BEGIN (256) first: the token that starts each document.

    Returns:
        Tokens in [0, 257).

    Raises:
        UnicodeEncodeError: The string holds half of a surrogate pair. It is a ValueError.

    Examples:
        >>> encode("né", begin=True)
        [256, 110, 195, 169]
    """
    raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return [BEGIN, *raw] if begin else list(raw)


def decode(tokens: Iterable[int]) -> str:
    """Turn tokens into text; BEGIN is left out, and bytes that are not UTF-8 become U+FFFD.

    Args:
        tokens: Tokens in [0, 257).

    Returns:
        The text.

    Raises:
        ValueError: A token lies outside [0, 257).

    Examples:
        >>> decode([256, 110, 195, 169])
        'né'
    """
    decoder = ByteDecoder()
    return "".join(map(decoder.push, tokens)) + decoder.finish()


class ByteDecoder:
    """Decodes a stream of tokens: a character appears with its last byte, never half of it.

    Examples:
        >>> decoder = ByteDecoder()
        >>> [decoder.push(token) for token in encode("né")]
        ['n', '', 'é']
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Take one token in [0, 257); return the text that it completes, often none.

        Raises:
            ValueError: The token lies outside [0, 257).
        """
        if not hasattr(token, "__index__") or not 0 <= token < VOCAB_SIZE:
            raise ValueError(f"token must be an integer in [0, {VOCAB_SIZE}), got {token!r}")
        if token == BEGIN:
            return self.finish()
        return self._decoder.decode(bytes([token]))

    def finish(self) -> str:
        """Return U+FFFD for a character left incomplete, else no text; then start afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
