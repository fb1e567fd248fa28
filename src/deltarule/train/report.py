"""`deltarule eval`: bits per byte of a trained run by length and position, printed and drawn."""

from dataclasses import dataclass
from pathlib import Path

from deltarule.train.data import encode_documents
from deltarule.train.device import choose_device
from deltarule.train.documents import (
    Document,
    Documents,
    limit_bytes,
    read_documents,
    split_documents,
)
from deltarule.train.evaluate import (
    PositionBin,
    bits_by_position,
    bits_per_byte,
    compressed_bits_per_byte,
)
from deltarule.train.figures import position_curve
from deltarule.train.run_folder import load_model, read_run


@dataclass(frozen=True)
class EvalRun:
    """Measure a trained model's bits per byte by position, print them and draw them."""

    folder: Path
    """Folder of a run, such as runs/text."""
    data: str | None = None
    """A text file or a folder; None is the run's own data. Of its own data, a run is measured on
    the part it was not trained on."""
    length: int = 2048
    """Cut documents into pieces of at most this many tokens."""
    max_bytes: int = 200_000
    """Measure on at most this many bytes."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1", "mps"; "auto" takes a GPU if PyTorch sees one."""

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        for name in ("length", "max_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")


def evaluate_run(run: EvalRun) -> list[PositionBin]:
    """Print bits per byte by length and by position, and write positions.png into the folder.

    Returns:
        The bins of positions.

    Raises:
        CheckpointError: The folder holds no model that can be read.
        DataError: The data cannot be read.
    """
    about = read_run(run.folder)
    options = about.get("configuration", {})
    model = load_model(run.folder, choose_device(run.device))
    read = read_documents(run.data if run.data is not None else options.get("data"))
    documents, part = measured_part(read, about)
    corpus = encode_documents([d.text for d in limit_bytes(documents, run.max_bytes)])
    trained = int(options.get("length", run.length))
    print(f"{run.folder} on {read.source}{part}: {corpus.num_bytes:,} bytes")
    if corpus.num_bytes < sum(len(d.text) for d in documents):
        print("(--max-bytes measures on more of it)")
    print()
    levels = compressed_bits_per_byte(corpus)
    lengths = sorted({trained, run.length})
    by_length = {f"length {n}": bits_per_byte(model, corpus, n) for n in lengths}
    for name, bits in {**by_length, **levels}.items():
        print(f"{name:<12} {bits:.3f} bits per byte")
    bins = bits_by_position(model, corpus, run.length)
    print("\n    position   bits per byte        bytes")
    for b in bins:
        print(f"{f'{b.first}-{b.last}':>12} {b.bits_per_byte:>15.3f} {b.num_bytes:>12,}")
    path = run.folder / "positions.png"
    position_curve(bins, path, trained_length=trained, levels=levels)
    print(f"\ndrawn in {path}")
    return bins


def measured_part(read: Documents, about: dict[str, object]) -> tuple[list[Document], str]:
    """All documents, or of the data the run was trained on, only those held out."""
    data, options = about.get("data"), about.get("configuration")
    if not (isinstance(data, dict) and isinstance(options, dict)):
        return read.documents, ""
    if data.get("sha256") != read.sha256:
        return read.documents, ""
    _, held_out = split_documents(read.documents, fraction=options["validation_fraction"])
    return held_out, ", the part held out of training"
