"""The tokens of `deltarule.models.bytes` as a tokenizer of transformers."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from deltarule.models.bytes import BEGIN

BEGIN_TEXT = "<|begin|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 257 tokens: the bytes of UTF-8, and BEGIN between documents.

    Save it beside a model of byte tokens, for transformers, lm-eval and whatever else reads
    tokenizer.json.

    Returns:
        A fast tokenizer that pads on the left; BEGIN begins, ends and pads.

    Examples:
        >>> tokens = byte_tokenizer()
        >>> tokens("né").input_ids, tokens.decode([110, 195, 169])
        ([110, 195, 169], 'né')
    """
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN_TEXT, eos_token=BEGIN_TEXT,
        pad_token=BEGIN_TEXT, padding_side="left", clean_up_tokenization_spaces=False,
    )  # fmt: skip
    assert made.convert_tokens_to_ids(BEGIN_TEXT) == BEGIN
    return made
