"""Which GPU each process of pytest-xdist takes."""

import os
from pathlib import Path


def spread() -> None:
    """Have each process begin with another GPU; to be called before CUDA is asked for anything."""
    # Where pytest-xdist is not at work, all stays as it is.
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        count = len(list(Path("/dev").glob("nvidia[0-9]*")))
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
        os.environ["CUDA_VISIBLE_DEVICES"] = turned(devices, int(worker.removeprefix("gw")))


def turned(devices: str, places: int) -> str:
    """The same GPUs, of which those in so many places go to the end.

    So the second GPU of a process, which few tests need, is another one, too.
    """
    names = devices.split(",")
    first = places % len(names)
    return ",".join(names[first:] + names[:first])
