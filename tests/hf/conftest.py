"""These tests need the extra `hf`, which a step of its own installs."""

import importlib.util
from importlib import metadata

import pytest

# An older transformers than the extra asks for is as good as none.
if importlib.util.find_spec("transformers") is None or tuple(
    map(int, metadata.version("transformers").split(".")[:2])
) < (5, 23):
    collect_ignore_glob = ["*.py"]


def pytest_collection_modifyitems(items):
    """PEFT and transformers warn about what is to change in each other."""
    for item in items:
        if "tests/hf/" in item.nodeid or item.nodeid.startswith("hf/"):
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))
