"""`deltarule train text`: a byte-level language model on any text, from the data to a sample."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deltarule.atomic_file import write_text
from deltarule.models import CausalLM
from deltarule.models.files import CONFIG
from deltarule.nn.checks import check_least, check_multiple
from deltarule.ops.context import make_context
from deltarule.parallel import MeshOptions, World
from deltarule.train.data import Corpus, ShuffledRows, Spans, row, with_empty_pieces
from deltarule.train.device import choose_device, to_device
from deltarule.train.documents import DataError, limit_bytes, read_documents, split_documents
from deltarule.train.evaluate import bits_per_byte, compressed_bits_per_byte
from deltarule.train.extra import MissingExtraError
from deltarule.train.job import LoopOptions
from deltarule.train.job import ModelOptions as ModelOptions
from deltarule.train.loop import Trainer, evaluating
from deltarule.train.metrics import WatchOptions
from deltarule.train.optimizer import OptimizerOptions
from deltarule.train.progress import as_shown, for_screen
from deltarule.train.run_folder import DataFacts
from deltarule.train.sample import GenerateRun, sample_text
from deltarule.train.token_shards import is_token_folder, open_token_folder, sample_documents
from deltarule.train.vocabulary import Encoder, make_encoder
from deltarule.train.whole_run import keep_figures, whole_run


@dataclass(frozen=True)
class TextRun:
    """Train a byte-level language model on text, and keep everything in runs/NAME."""

    data: str | None = None
    """A text file, a folder to search for text, or a folder of `deltarule data`; None is this
    Python's standard library. Each row of a .jsonl or .parquet file is a document."""
    text_field: str = "text"
    """The field or column of such a row that holds the text."""
    name: str | None = None
    """Name of the run; None is text, then text-2 and so on."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    resume: bool = False
    """Continue a run from its newest checkpoint; the result is as if it had never stopped."""
    tokenizer: str | None = None
    """Name or folder of a Hugging Face tokenizer, which is saved beside the model; None takes bytes
    as tokens, or the tokenizer of the shards."""
    length: int = 128
    """Tokens of a piece of a document; the model's memory starts afresh with each piece."""
    batch_tokens: int = 1024
    """Tokens in each optimizer step, packed from pieces of many documents."""
    max_bytes: int = 500_000_000
    """Stop reading data after this many bytes."""
    validation_fraction: float = 0.1
    """Share of the data held out of training; token shards have this share already."""
    validation_bytes: int = 200_000
    """Validate on at most this many bytes of it."""
    curve_bytes: int = 30_000
    """Use about this many of those, spread evenly, for each point of the loss curve."""
    long_length: int = 2048
    """Validate a second time with pieces of this many tokens."""
    sample_bytes: int = 400
    """Bytes, or tokens of a tokenizer, in the sample at the end; 0 for no sample."""
    sample_prompt: str = ""
    """Text that the sample continues; empty: the start of a document."""
    temperature: float = 0.7
    """Of the sample: 0 always takes the most likely byte, 1 draws as the model predicts."""
    mesh: MeshOptions = field(default_factory=MeshOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    loop: LoopOptions = field(default_factory=lambda: LoopOptions(steps=2000))
    watch: WatchOptions = field(default_factory=WatchOptions)

    def __post_init__(self) -> None:
        sizes = ("length", "batch_tokens", "validation_bytes", "curve_bytes", "long_length")
        check_least(self, 1, "max_bytes", *sizes)
        check_least(self, 0, "sample_bytes", "temperature")
        check_multiple("batch_tokens", self.batch_tokens, "accumulate", self.loop.accumulate)


class TextData(NamedTuple):
    """The data, what is trained on, and what is held out."""

    facts: DataFacts
    documents: int
    notes: list[str]
    training: Corpus
    validation: Corpus
    vocab_size: int
    # None: the tokenizer of shards is not there any more.
    encoder: Encoder | None


def read_text(run: TextRun) -> TextData:
    if run.data is not None and is_token_folder(run.data):
        return mapped(run.data, run.validation_bytes, run.tokenizer)
    encoder = make_encoder(run.tokenizer)
    read = read_documents(run.data, max_bytes=run.max_bytes, text_field=run.text_field)
    training, held_out = split_documents(read.documents, fraction=run.validation_fraction)
    held_out = limit_bytes(held_out, run.validation_bytes)
    first, second = (encoder.corpus([d.text for d in part]) for part in (training, held_out))
    for part, what in ((first, "train"), (second, "validate")):
        if not part.num_bytes:
            raise DataError(
                f"--validation-fraction {run.validation_fraction:g} of {read.num_bytes:,} bytes "
                f"leaves nothing to {what} on"
            )
    facts, count = DataFacts(read.source, read.num_bytes, read.sha256), len(read.documents)
    return TextData(facts, count, read.notes, first, second, encoder.vocab_size, encoder)


def mapped(folder: str, validation_bytes: int, tokenizer: str | None) -> TextData:
    opened = open_token_folder(folder)
    if tokenizer not in (None, made := opened.index.tokenizer):
        raise DataError(f"--tokenizer {tokenizer}: the shards in {folder} have {made or 'bytes'}")
    encoder, notes = None, []
    try:
        encoder = make_encoder(folder if made else None)
    except (ValueError, MissingExtraError) as error:
        notes = [f"no sample, and no tokenizer beside the model: {error}"]
    held_out = sample_documents(opened.validation, validation_bytes)
    first, second = opened.index.training, opened.index.validation
    facts = DataFacts(folder, first.bytes + second.bytes, f"{first.sha256} {second.sha256}")
    return TextData(
        facts, first.documents + second.documents, notes, opened.training, held_out,
        opened.index.vocab_size, encoder,
    )  # fmt: skip


class TextJob:
    """Rows of packed pieces, and the cross entropy of the next byte."""

    def __init__(
        self, run: TextRun, training: Corpus, validation: Corpus, world: World | None = None
    ) -> None:
        self.run, self.batch_tokens = run, run.batch_tokens
        # The processes that share each row.
        self.sharing: dist.ProcessGroup | None = None
        if world is not None and world.mesh is not None and world.mesh["context"].size() > 1:
            self.sharing = world.mesh["context"].get_group()
        rows = run.batch_tokens // run.loop.accumulate
        self.rows = ShuffledRows(training, length=run.length, row_tokens=rows, seed=run.loop.seed)
        self.validation = validation
        self.every = max(1, validation.num_bytes // run.curve_bytes)

    def next(self) -> Spans:
        """Places of the next row's shuffled pieces; a process that skips them reads nothing."""
        return self.rows.spans()

    def tensors(self, spans: Spans, device: torch.device) -> tuple[Tensor, ...]:
        """Tokens, targets and offsets, as many offsets in all but unusual rows."""
        batch = row(self.rows.corpus, *spans)
        if self.sharing is not None:
            return batch.tokens, batch.targets, batch.cu_seqlens
        if device.type == "cuda":
            batch = batch._replace(cu_seqlens=with_empty_pieces(batch.cu_seqlens))
        return tuple(to_device(x, device) for x in batch)

    def loss(self, model: CausalLM, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Mean nats a byte, and the same for display.

        Where processes share a row, all of it comes on the CPU, and the loss is that of the tokens
        here, by their share of the row.
        """
        tokens, targets, cu_seqlens = tensors
        if self.sharing is None:
            x, _ = model.hidden(tokens, cu_seqlens=cu_seqlens)
            loss = model.loss(x, targets)
            return loss, loss
        length, device = tokens.shape[1], model.embedding.weight.device
        context = make_context(length, group=self.sharing, cu_seqlens=cu_seqlens)
        here, expected = (to_device(context.part(x), device) for x in (tokens, targets))
        x, _ = model.hidden(here, context=context)
        loss = model.loss(x, expected) * ((context.last - context.first) / length)
        return loss, loss

    def shown(self, figures: list[float]) -> dict[str, float]:
        corpus = self.rows.corpus
        return {"bits/byte": figures[0] / math.log(2) * (corpus.predicted / corpus.num_bytes)}

    def evaluate(self, model: CausalLM) -> dict[str, float]:
        bits = bits_per_byte(model, self.validation, self.run.length, every=self.every)
        return {"validation_bits_per_byte": bits}

    def reading(self, step_seconds: float) -> float:
        """Seconds that validation will take, by those of a step: a forward is a third of it."""
        lengths = len({self.run.length, self.run.long_length})
        return lengths * self.validation.predicted / self.batch_tokens * step_seconds / 2.5

    def reserve(self, step_seconds: float) -> float:
        """The same, plus the compressors (xz takes a second a megabyte), figure and sample."""
        other = self.validation.num_bytes / 1e6 + 0.005 * self.run.sample_bytes + 1
        return self.reading(step_seconds) + other

    def position(self) -> dict[str, int]:
        return self.rows.position()

    def seek(self, position: dict[str, int]) -> None:
        self.rows.seek(position)


def train_text(run: TextRun) -> Path:
    """Do the whole of it: read, train, validate, sample and plot; return the run's folder."""
    began = time.monotonic()
    world = World(choose_device(run.loop.device), run.mesh)
    read = world.everywhere(lambda: read_text(run))
    config = run.model.config(read.vocab_size)
    job = TextJob(run, read.training, read.validation, world)

    def describe(folder: Path) -> None:
        for note in read.notes:
            print(for_screen(f"note: {note}"))
        print(f"run     {folder}")
        documents = "1 document" if read.documents == 1 else f"{read.documents:,} documents"
        print(for_screen(f"data    {read.facts.source}: {documents}, {read.facts.bytes:,} bytes"))
        rest = f"of the rest, {read.validation.num_bytes:,} to validate on"
        print(for_screen(f"        {read.training.num_bytes:,} bytes to train on; {rest}"))
        if read.encoder is not None:
            read.encoder.save(folder)
        write_text(folder / CONFIG, config.to_json())

    return whole_run(
        run, "train text", "text", config, job, describe,
        lambda trainer: finish(run, trainer, job, read, began), world=world, began=began,
        data=read.facts, reserve=job.reserve,
    )  # fmt: skip


def finish(run: TextRun, trainer: Trainer, job: TextJob, read: TextData, began: float) -> None:
    """Validate beside the compressors, draw the curve, print a sample."""
    model, folder, validation = trainer.model, trainer.folder, read.validation
    compressors = compressed_bits_per_byte(validation)
    limit, every = run.loop.max_seconds, 1
    end = math.inf if limit is None else began + limit
    if limit is not None and trainer.fastest < math.inf:
        left = max(end - time.monotonic() - 0.005 * run.sample_bytes, 0.1 * limit, 0.1)
        every = math.ceil(job.reading(trainer.fastest) / left)
    with evaluating(model):
        lengths = dict.fromkeys((run.length, run.long_length))
        ours = {
            f"length {n}": bits_per_byte(
                model, validation, n, every=every, what=f"validation, length {n}"
            )
            for n in lengths
        }
    table = {f"model, {name}": bits for name, bits in ours.items()} | compressors
    of = "" if every == 1 else f", the model's on one piece in {every}: --max-seconds"
    print(f"\nbits per byte on {validation.num_bytes:,} validation bytes{of}")
    for name, bits in table.items():
        print(f"  {name:<20} {bits:.3f}")
    final = {f"{x.replace(' ', '_')}_bits_per_byte": y for x, y in (ours | compressors).items()}
    keep_figures(trainer, final, "loss.png", "bits_per_byte", compressors)
    if run.sample_bytes and read.encoder is not None:
        unit = "bytes" if read.encoder.tool is None else "tokens"
        print(f"\nsample, {run.sample_bytes:,} {unit} at temperature {run.temperature:g}\n")
        print(as_shown(run.sample_prompt), end="")
        options = GenerateRun(
            folder, max_new_tokens=run.sample_bytes, temperature=run.temperature, seed=run.loop.seed
        )
        for text in sample_text(model, options, run.sample_prompt, read.encoder):
            print(as_shown(text), end="", flush=True)
            if time.monotonic() >= end:
                print("\n\n(--max-seconds ends the sample)", end="")
                break
        print("\n")
