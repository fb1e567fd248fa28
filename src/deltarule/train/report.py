"""`deltarule eval`: bits per byte of a trained run by length and position, printed and drawn."""

from dataclasses import dataclass
from pathlib import Path

from deltarule.nn.checks import check_least
from deltarule.train import evaluate
from deltarule.train.data import Corpus
from deltarule.train.device import choose_device
from deltarule.train.documents import DataError, limit_bytes, read_documents, split_documents
from deltarule.train.figures import position_curve
from deltarule.train.progress import for_screen
from deltarule.train.run_folder import RUN, read_run, stored_configuration
from deltarule.train.runs import load_model, run_of
from deltarule.train.text import TextRun
from deltarule.train.token_shards import is_token_folder, open_token_folder, sample_documents
from deltarule.train.vocabulary import Encoder, tokens_of

HELD_OUT = ", the part held out of training"


@dataclass(frozen=True)
class EvalRun:
    """Measure a trained model's bits per byte by position, print them and draw them."""

    folder: Path
    """Folder of a run, such as runs/text; with --data, of any saved model."""
    data: str | None = None
    """A text file or a folder; None is the part of the run's own data that was held out of
    training."""
    length: int = 2048
    """Cut documents into pieces of at most this many tokens."""
    max_bytes: int = 200_000
    """Measure on at most this many bytes."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1", "mps"; "auto" takes a GPU if PyTorch sees one."""
    output: Path | None = None
    """Where the PNG goes; None is positions.png in the run's folder, with --data positions-DATA."""

    def __post_init__(self) -> None:
        check_least(self, 1, "length", "max_bytes")


def evaluate_run(run: EvalRun) -> list[evaluate.PositionBin]:
    """Print bits per byte by length and by position, and draw those by position."""
    model = load_model(run.folder, choose_device(run.device))
    folder = run_of(run.folder)
    encoder = tokens_of(folder, model.config.vocab_size)
    # A model that lies alone, such as a converted one, is measured on the data that are given.
    of_run = run.data is None or (folder / RUN).exists()
    trained = stored_configuration(folder, TextRun, "train text") if of_run else TextRun()
    source, corpus, available, notes = measured(run, folder, trained, encoder)
    print(f"{run.folder} on {source}: {corpus.num_bytes:,} bytes")
    for note in notes:
        print(for_screen(f"note: {note}"))
    if corpus.num_bytes < available:
        print("(--max-bytes measures on more of it)")
    print()
    levels = evaluate.compressed_bits_per_byte(corpus)
    bins = evaluate.bits_by_position(model, corpus, run.length, what=f"length {run.length}")
    of_length = {run.length: evaluate.mean_bits(bins)}
    if of_run and (n := trained.length) not in of_length:
        of_length[n] = evaluate.bits_per_byte(model, corpus, n, what=f"length {n}")
    by_length = {f"length {n}": bits for n, bits in sorted(of_length.items())}
    for name, bits in {**by_length, **levels}.items():
        print(f"{name:<12} {bits:.3f} bits per byte")
    print("\n    position   bits per byte        bytes")
    for b in bins:
        print(f"{f'{b.first}-{b.last}':>12} {b.bits_per_byte:>15.3f} {b.num_bytes:>12,}")
    # The figure of the part held out of training stays.
    of_data = "" if run.data is None else f"-{Path(run.data).resolve().stem}"
    path = folder / f"positions{of_data}.png" if run.output is None else run.output
    trained_length = trained.length if of_run else None
    position_curve(bins, path, trained_length=trained_length, levels=levels)
    print(f"\ndrawn in {path}")
    return bins


def measured(
    run: EvalRun, folder: Path, trained: TextRun, encoder: Encoder
) -> tuple[str, Corpus, int, list[str]]:
    """What is measured on: its name, a corpus of about so many bytes, how many there are, notes.

    Data are read as the run has read them. Of the run's own, only what it held out is taken; a
    `DataError` says if they have changed.
    """
    data = trained.data if run.data is None else run.data
    if data is not None and is_token_folder(data):
        held_out = open_token_folder(data).validation
        some = sample_documents(held_out, run.max_bytes)
        return f"{data}{HELD_OUT}", some, held_out.num_bytes, []
    own = run.data is None or (
        trained.data is not None
        and Path(run.data).expanduser().resolve() == Path(trained.data).resolve()
    )
    data = trained.data if own else data
    read = read_documents(data, max_bytes=trained.max_bytes, text_field=trained.text_field)
    before = read_run(folder).data if (folder / RUN).exists() else None
    if before is not None and before.sha256 == read.sha256:
        _, documents = split_documents(read.documents, fraction=trained.validation_fraction)
        part = HELD_OUT
    elif own:
        was = f"{before.bytes:,} bytes" if before is not None else "unknown"
        now = f"{read.num_bytes:,} bytes"
        raise DataError(
            f"{read.source} is not what {folder} was trained on ({was} then, {now} now"
            f"{', not the same ones' if now == was else ''}), so what was held out of training is "
            f"not known; measure on other text with: deltarule eval {run.folder} --data PATH"
        )
    else:
        documents = read.documents
        part = ", other data than the run's: all of it, trained on or not"
    corpus = encoder.corpus([d.text for d in limit_bytes(documents, run.max_bytes)])
    return f"{read.source}{part}", corpus, sum(len(d.text) for d in documents), read.notes
