"""What the extra `test` promises must be there: tests that need it fail without, and never skip."""

import importlib
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def promised(module: str) -> ModuleType:
    """Import a module; skip the test only where the extra leaves it out, as on another system."""
    return importlib.import_module(module) if module in PROMISED else pytest.importorskip(module)


def names(extra: str) -> set[str]:
    """What an extra installs on this system, that of extras which it names included."""
    found = set()
    for line in PROJECT["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate():
            found.add(requirement.name)
            for inner in requirement.extras:
                found |= names(inner)
    return found


PROMISED = names("test")
