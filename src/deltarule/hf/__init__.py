"""transformers: its models on this library's operators, and this library's model as one of its.

The one part of the library that imports transformers; the extra is `hf`.
"""

from importlib import metadata

OLDEST = (5, 23)


def _check_transformers() -> None:
    """Raise an ImportError that says what to install."""
    wanted = "transformers {}.{} or later".format(*OLDEST)
    how = 'pip install "deltarule[hf]" (from a checkout: pip install -e ".[hf]")'
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise ImportError(f"deltarule.hf needs {wanted}: {how}") from None
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise ImportError(f"deltarule.hf needs {wanted}, and {version} is installed: {how}")


_check_transformers()

from deltarule.hf.cache import StateCache  # noqa: E402
from deltarule.hf.configuration import DeltaruleConfig  # noqa: E402
from deltarule.hf.model import DeltaruleForCausalLM, wrap  # noqa: E402
from deltarule.hf.patch import Patch, patch  # noqa: E402
from deltarule.hf.tokenizer import byte_tokenizer  # noqa: E402

__all__ = [
    "DeltaruleConfig", "DeltaruleForCausalLM", "Patch", "StateCache", "byte_tokenizer", "patch",
    "wrap",
]  # fmt: skip
