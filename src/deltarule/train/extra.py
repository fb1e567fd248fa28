"""The packages of optional extras, imported only where they are used."""

import importlib
from types import ModuleType


class MissingExtraError(ImportError):
    """A package of an optional extra is not installed."""


def require(module: str, extra: str = "train") -> ModuleType:
    """Import a module of an extra, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        raise MissingExtraError(
            f"this needs {package}, which is in the extra '{extra}': "
            f'pip install "deltarule[{extra}]" (from a checkout: pip install -e ".[{extra}]")'
        ) from error
