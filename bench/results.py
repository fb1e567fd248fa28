"""What a benchmark leaves: one JSON file of rows, each with what it was measured on."""

import hashlib
import importlib.metadata
import json
import platform
import shlex
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import deltarule
from bench.cases import OPERATIONS, Shape
from bench.counts import count
from deltarule.atomic_file import write_json

Row = dict[str, Any]
# Peer, case and figures of one row.
Found = tuple[str, Row, Row]

FORMAT = 1
# Names of the two passes in a row, and for a reader.
FORWARD, BOTH = "forward", "forward_backward"
PASSES = {FORWARD: "forward", BOTH: "forward + backward"}
PACKAGES = [
    "triton", "flash-linear-attention", "flash-qla", "tilelang", "flashinfer-python",
    "nvidia-cutlass-dsl", "transformers", "torchao", "xlstm",
]  # fmt: skip


def new_report(arguments: Sequence[str], program: str = "deltarule") -> Row:
    """A report without rows: when, with what, and by which command."""
    return {
        "format": FORMAT, "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "command": " ".join([program, shlex.join(arguments)]).strip(), "versions": versions(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernels": kernels(), "ceilings": None, "rows": [],
    }  # fmt: skip


def kernels() -> str:
    """A digest of the operators' code, which tells whether two runs timed the same kernels."""
    digest = hashlib.sha256()
    for path in sorted((Path(deltarule.__file__).parent / "ops").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def file_each(report: Row, found: Iterable[Found], output: Path | None) -> Row:
    """File figures as they come: each is printed, and the whole report is written again."""
    for peer, case, figures in found:
        print(brief(add(report, peer, case, figures))[1:-1], flush=True)
        if output is not None:
            save(report, output)
    return report


def brief(value: object) -> str:
    """Numbers in four digits, a shape by its name.

    Examples:
        >>> brief({"graph_ms": 0.123456}), brief(["8x4096-h16", 8, 4096])
        ('(graph_ms=0.1235)', '8x4096-h16')
    """
    if isinstance(value, dict):
        return f"({' '.join(f'{name}={brief(inner)}' for name, inner in value.items())})"
    if isinstance(value, list) and value and isinstance(value[0], str):
        return value[0]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def versions() -> dict[str, str]:
    """Versions of all installed packages that a time depends on."""
    python = platform.python_version()
    found = {"deltarule": deltarule.__version__, "torch": torch.__version__, "python": python}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def add(report: Row, peer: str, case: Row, figures: Row) -> Row:
    """File the figures of a case in the report, with rates and the floor; return what was filed.

    Of a timed pass that is a row of its own, though both passes are kept in one.
    """
    if case["kind"] == "ceilings":
        report["device"] = figures.get("device")
        report["ceilings"] = figures
        return figures
    row = {"peer": peer, **case, **figures}
    if case["kind"] != "time":
        report["rows"].append(row)
        return row
    del row["backward"]
    if "error" in row:
        row[BOTH if case["backward"] else FORWARD] = {"error": row.pop("error")}
    row |= {name: with_rates(row, name) for name in PASSES if name in row}
    for kept in report["rows"]:
        if all(kept.get(name) == row[name] for name in ("kind", "peer", "operation", "shape")):
            kept.update(row)
            return row
    report["rows"].append(dict(row))
    return row


def with_rates(row: Row, name: str) -> Row:
    """A pass with its floor, and from the time of its graph its rates and distance from it."""
    operation, shape = OPERATIONS[row["operation"]], Shape(*row["shape"])
    least = count(operation, shape, backward=name == BOTH)
    figures = row[name] | {"floor_ms": least.floor_ms}
    if (ms := figures.get("graph_ms")) is not None:
        figures["TFLOP_s"], figures["GB_s"] = least.operations / ms / 1e9, least.bytes / ms / 1e6
        figures["times_floor"] = ms / least.floor_ms
    return figures


def save(report: Row, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, report, indent=1)


def load(path: Path) -> Row:
    try:
        report = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ValueError(f"{path} is not a report of `deltarule bench` in format {FORMAT}")
    return report
