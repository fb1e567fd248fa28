"""Text that a model writes, character by character, after prompts from anywhere."""

import contextlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from deltarule.models import CausalLM
from deltarule.nn.checks import check_least
from deltarule.train.device import choose_device
from deltarule.train.progress import as_shown
from deltarule.train.runs import load_model, run_of
from deltarule.train.vocabulary import Encoder, tokens_of


@dataclass(frozen=True)
class GenerateRun:
    """Write text with a trained model: deltarule generate RUN "prompt"."""

    folder: Path
    """Folder of a run, such as runs/text, or of one of its checkpoints."""
    prompt: str = ""
    """Beginning of the text; empty: the start of a document. It may follow the folder without this
    flag."""
    prompt_file: str | None = None
    """A file that holds the prompt; - is standard input."""
    lines: bool = False
    """Each line of that file is a prompt."""
    interactive: bool = False
    """Ask for prompts, one per line, until the input ends (Ctrl-D)."""
    samples: int = 1
    """Texts for each prompt."""
    max_new_tokens: int = 1000
    """The most bytes, or tokens of the run's tokenizer, to add."""
    stop: tuple[str, ...] = ()
    """A text ends after any of these strings."""
    temperature: float = 0.8
    """0 always takes the most likely byte, 1 draws as the model predicts."""
    top_k: int | None = None
    """Draw from this many of the most likely bytes; None means all."""
    top_p: float | None = None
    """Draw from the most likely bytes that together reach this probability; None means all."""
    min_p: float | None = None
    """Draw from bytes at least this many times as likely as the most likely; None means all."""
    repetition_penalty: float = 1.0
    """Above 1, bytes that the text already holds are less likely."""
    draft: int = 0
    """Bytes, up to 15, to guess and read in one step: the same text, but faster where it repeats
    itself."""
    seed: int | None = None
    """The same seed gives the same text; None draws a new one. Each further text takes the next
    seed."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1", "mps"; "auto" takes a GPU if PyTorch sees one."""

    def __post_init__(self) -> None:
        if (self.prompt != "") + (self.prompt_file is not None) + self.interactive > 1:
            raise ValueError("prompt, prompt_file and interactive exclude each other: give one")
        if self.lines and self.prompt_file is None:
            raise ValueError("lines needs prompt_file, whose lines are prompts; - is stdin")
        check_least(self, 1, "samples")
        if "" in self.stop:
            raise ValueError("stop holds an empty word, after which every text would end at once")


def generate_text(run: GenerateRun) -> None:
    model = load_model(run.folder, choose_device(run.device))
    encoder = tokens_of(run_of(run.folder), model.config.vocab_size)
    several = run.samples > 1 or run.lines
    count = 0
    for prompt in prompts(run):
        for _ in range(run.samples):
            seed = None if run.seed is None else run.seed + count
            texts = sample_text(model, replace(run, seed=seed), prompt, encoder)
            # Refuses what is out of range before anything stands on the screen.
            first = next(texts, "")
            if several:
                print(f"--- {count + 1}")
            # What was typed stands there already.
            print("" if run.interactive else as_shown(prompt), end="")
            for characters in itertools.chain([first], texts):
                print(as_shown(characters), end="", flush=True)
            print()
            count += 1


def prompts(run: GenerateRun) -> Iterator[str]:
    if run.interactive:
        if sys.stdin.isatty():
            import readline  # noqa: F401  input() takes it from here on
        with contextlib.suppress(EOFError):
            while True:
                yield input("> " if sys.stdin.isatty() else "")
    elif run.prompt_file is None:
        yield run.prompt
    else:
        try:
            with open(0 if run.prompt_file == "-" else run.prompt_file, "rb") as file:
                text = file.read().decode(errors="surrogateescape")
        except OSError as error:
            raise ValueError(f"--prompt-file {run.prompt_file}: {error.strerror}") from None
        yield from text.splitlines() if run.lines else [text]


def sample_text(model: CausalLM, run: GenerateRun, prompt: str, encoder: Encoder) -> Iterator[str]:
    """Continue a prompt that starts a document, until the document ends or enough is written.

    The added characters are given as they are completed, without the prompt, with the word that
    stops them.
    """
    decoder = encoder.decoder()
    tokens = model.stream(
        encoder.prompt(prompt), max_new_tokens=run.max_new_tokens, temperature=run.temperature,
        top_k=run.top_k, top_p=run.top_p, min_p=run.min_p,
        repetition_penalty=run.repetition_penalty, stop=[encoder.begin], seed=run.seed,
        draft=run.draft,
    )  # fmt: skip
    longest = max(map(len, run.stop), default=0)
    before = ""
    for token in tokens:
        text = before + (new := decoder.push(token))
        ends = [at + len(word) for word in run.stop if (at := text.find(word)) >= 0]
        if ends:
            yield text[len(before) : min(ends)]
            return
        yield new
        before = text[max(0, len(text) - longest + 1) :]
    yield decoder.finish()
