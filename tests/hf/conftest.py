"""These tests need the extra `hf`, which a step of its own installs."""

import importlib.util
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from promised import PROJECT

WANTED = map(Requirement, PROJECT["optional-dependencies"]["hf"])
TRANSFORMERS = next(wanted for wanted in WANTED if wanted.name == "transformers")
# An older transformers than the extra asks for is as good as none.
if (
    importlib.util.find_spec("transformers") is None
    or metadata.version("transformers") not in TRANSFORMERS.specifier
):
    collect_ignore_glob = ["*.py"]


def pytest_collection_modifyitems(items):
    """PEFT and transformers warn about what is to change in each other."""
    for item in items:
        if "tests/hf/" in item.nodeid or item.nodeid.startswith("hf/"):
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))
