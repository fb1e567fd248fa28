"""Two and four processes, started when the first test asks for them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from processes import Processes


@pytest.fixture(scope="session")
def two() -> Iterator[Processes]:
    processes = Processes(2)
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def four() -> Iterator[Processes]:
    processes = Processes(4)
    yield processes
    processes.close()
