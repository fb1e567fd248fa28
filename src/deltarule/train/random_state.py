"""The state of every random generator a run may draw from, as JSON and back."""

import base64
import random
from typing import Any

import numpy as np
import torch

Json = dict[str, Any]


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  code that a user adds may draw from the global one
    torch.manual_seed(seed)


def random_state() -> Json:
    """The state of Python's, numpy's and torch's generators.

    Examples:
        >>> before = random_state()
        >>> drawn = torch.rand(3)
        >>> restore_random_state(before)
        >>> bool((torch.rand(3) == drawn).all())
        True
    """
    version, words, gauss = random.getstate()
    name, keys, at, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(at), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(s) for s in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
    }


def restore_random_state(state: Json) -> None:
    """Put the generators back; device states that this machine has no device for are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(_decode(state["torch"]))
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_decode(s) for s in state["cuda"]])


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
