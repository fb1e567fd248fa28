import pytest

from deltarule.models.bytes import BEGIN, VOCAB_SIZE, ByteDecoder, decode, encode


@pytest.mark.parametrize("text", ["", "plain", "né €uro 🙂", "a\0b\r\n"])
def test_text_comes_back(text):
    tokens = encode(text, begin=True)
    assert tokens == [BEGIN, *text.encode()]
    assert decode(tokens) == text


def test_the_tokens_are_256_bytes_and_begin():
    assert encode(bytes(range(256))) == list(range(256))
    assert VOCAB_SIZE == BEGIN + 1 == 257
    # Undecodable arguments turn back into their bytes.
    assert encode(b"a\xff".decode("utf-8", "surrogateescape")) == [0x61, 0xFF]
    with pytest.raises(ValueError, match="surrogates not allowed"):
        encode("\ud800")


def test_bytes_that_are_not_utf8_are_marked():
    assert decode([0x61, 0xFF, 0x62]) == "a\ufffdb"
    assert decode([0x61, 0xE2, 0x82]) == "a\ufffd"


@pytest.mark.parametrize("text", ["né €uro 🙂", "\xff\xfe"])
def test_a_stream_gives_whole_characters(text):
    decoder = ByteDecoder()
    parts = [decoder.push(token) for token in encode(text)]
    assert "".join(parts) == text
    assert "\ufffd" not in parts
    assert decoder.finish() == ""


def test_a_stream_equals_decoding_at_once_on_damaged_bytes():
    tokens = [*range(0, 256, 7), 0xE2, 0x82, BEGIN, 0xAC, 0xF0, 0x9F]
    decoder = ByteDecoder()
    assert "".join(map(decoder.push, tokens)) + decoder.finish() == decode(tokens)
    whole = bytes(t for t in tokens[:-4]) + b"", bytes(t for t in tokens[-3:])
    assert decode(tokens) == "".join(part.decode("utf-8", "replace") for part in whole)


@pytest.mark.parametrize("token", [-1, 257, "a", 1.5, None])
def test_unknown_tokens_are_refused(token):
    with pytest.raises(ValueError, match=f"token must be an integer .*, got {token!r}"):
        decode([token])
