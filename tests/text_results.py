"""Results of cells that were never run, for the tests of figures and tables."""

from deltarule.train.evaluate import bin_edges
from experiments.experiment import Result
from experiments.records import plain
from experiments.text_cell import TextCell


def text_result(cell: TextCell, bits: float) -> Result:
    """What a run of this cell would return if it ended at so many bits per byte."""
    evaluations = {
        str(length): {
            "bits_per_byte": bits, "standard_error": 0.01, "rows": 4,
            "positions": [[first, last, bits] for first, last in bin_edges(length)],
        }
        for length in cell.lengths
    }  # fmt: skip
    figures = {
        "evaluations": evaluations, "curve": [[250, bits + 1.0], [500, bits]],
        "parameters": 450_000, "tokens": 1_000_000,
        "data": {"source": "a text", "bytes": 1000, "sha256": "0"},
    }  # fmt: skip
    return Result(cell.name, plain(cell), figures, None, 60.0)


def failed(cell: object, error: str) -> Result:
    """A cell that came to nothing."""
    return Result(cell.name, plain(cell), {}, error, 1.0)  # type: ignore[attr-defined]
