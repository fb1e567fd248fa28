"""Text that a byte-level model writes, character by character."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deltarule.models import CausalLM
from deltarule.train.device import choose_device
from deltarule.train.run_model import load_model, run_of
from deltarule.train.vocabulary import Encoder, make_encoder, tokens_of


@dataclass(frozen=True)
class GenerateRun:
    """Write text with a trained model, as it comes."""

    folder: Path
    """Folder of a run, such as runs/text."""
    prompt: str = ""
    """Beginning of the text; nothing means the start of a document."""
    max_new_tokens: int = 1000
    """The most bytes, or tokens of the run's tokenizer, to add."""
    temperature: float = 0.8
    """0 always takes the likeliest byte, 1 follows the model."""
    top_k: int | None = None
    """Draw among this many of the likeliest bytes; None means all."""
    top_p: float | None = None
    """Draw among the likeliest bytes that have this probability together; None means all."""
    seed: int | None = None
    """The same seed gives the same text; None draws a fresh one."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1", "mps"; "auto" takes a GPU if PyTorch sees one."""


def generate_text(run: GenerateRun) -> None:
    """Print the prompt and what the model adds to it, character by character.

    Raises:
        CheckpointError: The folder holds no model that can be read.
        ValueError: An option is out of range.
    """
    model = load_model(run.folder, choose_device(run.device), of_bytes=False)
    encoder = tokens_of(run_of(run.folder), model.config.vocab_size)
    print(run.prompt, end="", flush=True)
    for characters in sample_text(
        model, run.prompt, encoder=encoder, max_new_tokens=run.max_new_tokens,
        temperature=run.temperature, top_k=run.top_k, top_p=run.top_p, seed=run.seed,
    ):  # fmt: skip
        print(characters, end="", flush=True)
    print()


def sample_text(
    model: CausalLM,
    prompt: str,
    *,
    encoder: Encoder | None = None,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Iterator[str]:
    """Continue a prompt that starts a document, until the document ends or enough is written.

    Args:
        model: A model of byte tokens, or of those of the encoder.
        prompt: The beginning of the document; it may be empty.
        encoder: Of `deltarule.train.vocabulary`. None: tokens are bytes.
        max_new_tokens: The most tokens to add.
        temperature: 0 always takes the likeliest byte, 1 follows the model.
        top_k: Draw among the k likeliest bytes only. None means all.
        top_p: Draw among the likeliest bytes that together have this probability. None means all.
        seed: The same seed gives the same text. None draws a fresh one.

    Returns:
        The added characters as they are completed, without the prompt.

    Raises:
        ValueError: An option is out of range.
    """
    encoder = make_encoder(None) if encoder is None else encoder
    decoder = encoder.decoder()
    tokens = model.stream(
        encoder.prompt(prompt), max_new_tokens=max_new_tokens, temperature=temperature,
        top_k=top_k, top_p=top_p, stop=[encoder.begin], seed=seed,
    )  # fmt: skip
    for token in tokens:
        yield decoder.push(token)
    yield decoder.finish()
